-- Quarto runs this after rendering the whole book (`project: post-render`). It makes the pages
-- lighter: style rules for classes and ids that occur nowhere in the site's pages and scripts go,
-- and so does the icon font (theme/book.scss draws the few icons that the pages use).
-- A rule is only dropped when one of its names is written in no file at all, so what a script
-- adds to a page later keeps its style. The scripts of the search, a fifth of a page, wait until
-- book.js loads them with the first use.

local site = os.getenv("QUARTO_PROJECT_OUTPUT_DIR")
if not site or not os.getenv("QUARTO_PROJECT_RENDER_ALL") then
  return -- a preview of one page knows only the names of that page
end

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read("a")
  file:close()
  return text
end

local function write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

local function files(directory, found)
  for _, name in ipairs(pandoc.system.list_directory(directory)) do
    local path = pandoc.path.join({ directory, name })
    if pcall(pandoc.system.list_directory, path) then
      files(path, found)
    else
      found[#found + 1] = path
    end
  end
  return found
end

-- The position of the first of `wanted` at or after `start`, outside strings, comments and
-- parentheses, and that character.
local function scan(css, start, wanted)
  local position, depth = start, 0
  while position <= #css do
    local character = css:sub(position, position)
    if character == '"' or character == "'" then
      position = position + 1
      while position <= #css and css:sub(position, position) ~= character do
        position = position + (css:sub(position, position) == "\\" and 2 or 1)
      end
    elseif css:sub(position, position + 1) == "/*" then
      position = select(2, css:find("*/", position + 2, true)) or #css
    elseif character == "\\" then
      position = position + 1
    elseif character == "(" then
      depth = depth + 1
    elseif character == ")" then
      depth = depth - 1
    elseif depth == 0 and wanted:find(character, 1, true) then
      return position, character
    end
    position = position + 1
  end
end

local function split_selectors(list)
  local selectors, start = {}, 1
  while true do
    local comma = scan(list, start, ",")
    selectors[#selectors + 1] = list:sub(start, (comma or 0) - 1)
    if not comma then
      return selectors
    end
    start = comma + 1
  end
end

-- Names inside :not(), :is() and the like, attribute values and escapes do not count against it.
local function is_used(selector, names)
  if selector:find("\\", 1, true) then
    return true
  end
  local plain = selector:gsub("%b()", ""):gsub("%b[]", "")
  for name in plain:gmatch("[.#]([%a_-][%w_-]*)") do
    if not names[name] then
      return false
    end
  end
  return true
end

local function trim(css, names)
  local kept, start = {}, 1
  while true do
    local position, character = scan(css, start, "{;")
    if not position then
      return table.concat(kept) .. css:sub(start):gsub("^%s+$", "")
    end
    local prelude = css:sub(start, position - 1):gsub("/%*.-%*/", ""):gsub("^%s+", "")
    if character == ";" then
      kept[#kept + 1] = prelude .. ";"
      start = position + 1
    else
      local depth, close = 1, position
      repeat
        local at, brace = scan(css, close + 1, "{}")
        assert(at, "a style sheet ends inside a rule: " .. prelude:sub(1, 80))
        depth = depth + (brace == "{" and 1 or -1)
        close = at
      until depth == 0
      local body = css:sub(position + 1, close - 1)
      if prelude:match("^@media") or prelude:match("^@supports") then
        body = trim(body, names)
      elseif prelude:sub(1, 1) ~= "@" then
        local used = {}
        for _, selector in ipairs(split_selectors(prelude)) do
          if is_used(selector, names) then
            used[#used + 1] = selector
          end
        end
        prelude = table.concat(used, ",")
        body = prelude == "" and "" or body:gsub("%-%-quarto%-scss%-export%-[^;]*;?", "")
      end
      if body ~= "" then
        kept[#kept + 1] = prelude .. "{" .. body .. "}"
      end
      start = close + 1
    end
  end
end

-- Bootstrap's script names the classes of all its components. Those in use stand in a page, too,
-- apart from what it adds while something unfolds.
local everything = files(site, {})
local names = { collapsing = true, ["collapse-horizontal"] = true, showing = true }
for _, path in ipairs(everything) do
  if path:match("%.html$") or (path:match("%.js$") and not path:match("bootstrap%.min%.js$")) then
    for name in read(path):gmatch("[%a_-][%w_-]*") do
      names[name] = true
    end
  end
end

for _, path in ipairs(everything) do
  if path:match("bootstrap%-icons%.css$") then
    write(path, "/* The few icons in use are drawn by the theme. */\n")
  elseif path:match("bootstrap%-icons%.woff2?$") then
    os.remove(path)
  elseif path:match("site_libs.*%.css$") then
    write(path, trim(read(path), names))
  end
end

local SEARCH = '<script src="([^"]*/quarto%-search/[^"]*)"></script>'

for _, path in ipairs(everything) do
  if path:match("%.html$") then
    local page, count = read(path):gsub(SEARCH, '<script type="text/plain" data-search="%1"></script>')
    if count > 0 then
      write(path, page)
    end
  end
end
