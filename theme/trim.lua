-- Quarto runs this after rendering the whole book (`project: post-render`). It halves a page's weight:
-- style rules for classes and ids that are written nowhere in the site's pages and scripts go, and so
-- does the icon font (theme/book.scss draws the few icons in use). The scripts of the search, a fifth
-- of a page, wait until theme/book.js loads them with the first use. Ours, because PurgeCSS needs Node,
-- which Quarto does not bring.

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
    local path = pandoc.path.join { directory, name }
    if not pcall(pandoc.system.list_directory, path) then
      table.insert(found, path)
    else
      files(path, found)
    end
  end
  return found
end

-- Whether all the classes and ids of a selector are in use, those in brackets apart.
local function is_used(selector, names)
  local plain = selector:gsub("%b()", ""):gsub("%b[]", "")
  for name in plain:gmatch("[.#]([%a_-][%w_-]*)") do
    if not names[name] and not plain:find("\\", 1, true) then return false end
  end
  return true
end

local function used_selectors(list, names)
  local used = {}
  list = list:gsub("%b()", function(inside) return (inside:gsub(",", "\0")) end)
  for selector in list:gmatch("[^,]+") do
    selector = selector:gsub("\0", ",")
    if is_used(selector, names) then table.insert(used, selector) end
  end
  return table.concat(used, ",")
end

-- The style sheet without the rules that nothing uses.
local function trim(css, names)
  return (css:gsub("/%*.-%*/", ""):gsub("([^{};]+)(%b{})", function(prelude, body)
    if prelude:match("^%s*@media") or prelude:match("^%s*@supports") then
      body = "{" .. trim(body:sub(2, -2), names) .. "}"
    elseif not prelude:match("^%s*@") then
      prelude = used_selectors(prelude, names)
      body = prelude == "" and "" or body:gsub("%-%-quarto%-scss%-export%-[^;}]*;?", "")
    end
    return body:match("[^{}%s]") and prelude .. body or ""
  end))
end

-- Bootstrap's script names the classes of all its components. Those in use stand in a page, too,
-- apart from what it adds while something unfolds.
local everything = files(site, {})
local names = { collapsing = true, ["collapse-horizontal"] = true, showing = true }
for _, path in ipairs(everything) do
  if path:match("%.html$") or path:match("%.js$") and not path:match("bootstrap%.min%.js$") then
    for name in read(path):gmatch("[%a_-][%w_-]*") do names[name] = true end
  end
end

local SEARCH = '<script[^>]-src="([^"]*/quarto%-search/[^"]*)"[^>]*></script>'
for _, path in ipairs(everything) do
  if path:match("bootstrap%-icons%.css$") then
    write(path, "/* The few icons in use are drawn by the theme. */\n")
  elseif path:match("bootstrap%-icons%.woff2?$") then
    os.remove(path)
  elseif path:match("site_libs.*%.css$") then
    write(path, trim(read(path), names))
  elseif path:match("%.html$") then
    write(path, (read(path):gsub(SEARCH, '<script type="text/plain" data-search="%1"></script>')))
  end
end
