-- Quarto runs this after rendering the whole book (`project: post-render`). It halves a page's weight:
-- style rules for classes and ids, and variables, that the site's pages and scripts do not use go, and so
-- does the icon font (theme/book.scss draws the few icons in use) and Quarto's search (theme/search.js
-- reads its index). Scripts inside the pages become files, so that the content security policy of
-- theme/head.html lets them run, and all wait until the page is there: the style sheets are fetched first.
-- Ours, because PurgeCSS needs Node, which Quarto does not bring.

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

local POLICY = '<meta http%-equiv="Content%-Security%-Policy"[^>]*>\n?'

-- `quarto preview --profile preview` runs scripts that stand in the pages: they have no policy. Nor has a page
-- that is rendered by itself.
local site = os.getenv("QUARTO_PROJECT_OUTPUT_DIR")
if os.getenv("QUARTO_PROFILE") == "preview" or not os.getenv("QUARTO_PROJECT_RENDER_ALL") then
  for path in (os.getenv("QUARTO_PROJECT_OUTPUT_FILES") or ""):gmatch("[^\n]+%.html") do
    write(path, (read(path):gsub(POLICY, "")))
  end
  return
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
      body = prelude == "" and "" or body:gsub("(%-%-[%w-]+):[^;{}]*;?", function(name) return not names[name] and "" end)
    end
    return body:match("[^{}%s]") and prelude .. body or ""
  end))
end

-- What names something in a page, the variables in use, and all words of the scripts. Bootstrap's own names the classes of all its
-- components: those in use stand in a page, too, apart from what it adds while something unfolds.
local everything = files(site, {})
local names = { collapsing = true, ["collapse-horizontal"] = true, showing = true }
local function is_dropped(path) return path:match("site_libs[/\\]quarto%-search[/\\]") end
for _, path in ipairs(everything) do
  if path:match("%.html$") or path:match("%.css$") then
    for name in read(path):gmatch("var%(%s*(%-%-[%w-]+)") do names[name] = true end
  end
  if path:match("%.html$") then
    for attribute, list in read(path):gmatch '%f[%w](%l+)="([^"]*)"' do
      if attribute == "class" or attribute == "id" then
        for name in list:gmatch("%S+") do names[name] = true end
      end
    end
  elseif path:match("%.js$") and not path:match("bootstrap%.min%.js$") and not is_dropped(path) then
    for name in read(path):gmatch("[%a_-][%w_-]*") do names[name] = true end
  end
end

local SEARCH = '<script[^>]-src="[^"]*/quarto%-search/[^"]*"[^>]*></script>'
local ICONS = '<link href="[^"]*/bootstrap%-icons%.css"[^>]*>\n?'

local function setting(name) return read("_quarto.yml"):match("\n%s*" .. name .. ":%s*[\"']?([^\n\"']+)") end

-- What search engines are told of a page: its one address, and what it is a part of.
local function description(html, url)
  local home = setting("site%-url"):gsub("/*$", "/")
  local function text(pattern) return pandoc.utils.stringify(pandoc.read(html:match(pattern) or "", "html")) end
  local data = {
    ["@context"] = "https://schema.org",
    ["@type"] = "TechArticle",
    headline = text "<title>(.-)</title>",
    description = text '<meta name="description" content="([^"]*)"',
    url = home .. url,
    isPartOf = { ["@type"] = "Book", name = setting "title", url = home },
  }
  local json = pandoc.json.encode(data):gsub("<", "\\u003c")
  return ('<link rel="canonical" href="%s">\n<script type="application/ld+json">%s</script>\n'):format(data.url, json)
end

-- The page with its head's style sheets before its scripts: a browser fetches in this order, and shows nothing
-- before the style is there.
local function style_first(html)
  local head, body = html:match("^(.-</head>)(.*)$")
  local styles = {}
  head = head:gsub('<link[^>]*%srel="stylesheet"[^>]*>\n?', function(link)
    table.insert(styles, link)
    return ""
  end)
  return head:gsub("<script[^>]*%ssrc=", function(script) return table.concat(styles) .. script end, 1) .. body
end

-- A page without scripts and handlers inside it, with the policy before all that it concerns.
local function secured(html, url)
  local up = html:match('src="([^"]*)site_libs/') or ""
  local function outside(attributes, body)
    if not body:find("%S") or attributes:find("json", 1, true) then return nil end
    local name = ("site_libs/page/%s.js"):format(pandoc.utils.sha1(body):sub(1, 12))
    write(pandoc.path.join { site, name }, body)
    return ('<script%s src="%s%s" defer></script>'):format(attributes, up, name)
  end
  html = html:gsub(SEARCH, ""):gsub(ICONS, ""):gsub("<script([^>]*)>(.-)</script>", outside)
  html = html:gsub('<script src="([^"]*site_libs/[^"]*)"></script>', '<script src="%1" defer></script>')
  html = html:gsub("<%a[^<>]* onclick=[^<>]*>", function(tag) return (tag:gsub(' onclick="[^"]*"', "")) end)
  html = style_first(html)
  local policy = html:match(POLICY) or ""
  local head = url ~= "404.html" and description(html, url) or ""
  html = html:gsub(POLICY, "")
  return (html:gsub('<meta charset="utf%-8">\n?', function(charset) return charset .. policy .. head end, 1))
end

pandoc.system.make_directory(pandoc.path.join { site, "site_libs", "page" }, true)
for _, path in ipairs(everything) do
  if path:match("bootstrap%-icons%.%a+2?$") or is_dropped(path) then
    os.remove(path)
  elseif path:match("site_libs.*%.css$") then
    write(path, trim(read(path), names))
  elseif path:match("%.html$") then
    write(path, secured(read(path), (pandoc.path.make_relative(path, site):gsub("\\", "/"))))
  end
end
