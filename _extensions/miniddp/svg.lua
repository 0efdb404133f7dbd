-- Prepares an SVG file for being part of a page.

local M = {}

-- The colours of theme/book.css in light mode, as figures are drawn with them.
local PALETTE = {
  ["#2563eb"] = "--rank-0", ["#c2410c"] = "--rank-1", ["#15803d"] = "--rank-2", ["#a21caf"] = "--rank-3",
  ["#b45309"] = "--rank-4", ["#0e7490"] = "--rank-5", ["#be123c"] = "--rank-6", ["#4d7c0f"] = "--rank-7",
  ["#1b1f24"] = "--fg", ["#57606a"] = "--muted", ["#8b949e"] = "--line", ["#f6f8fa"] = "--surface",
  ["#ffffff"] = "--bg",
}

local ESCAPES = { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" }

local function escape(text) return (text:gsub('[&<>"]', ESCAPES)) end

-- The root element's attributes as a list of { name, value }, and what is inside; nil if it is no SVG.
function M.parse(text)
  text = text:gsub("<%?.-%?>", ""):gsub("<!%-%-.-%-%->", ""):gsub("<!DOCTYPE[^>]*>", "")
  text = text:gsub("<metadata.->.-</metadata>", "")
  local root, body = text:match("<svg(%s[^>]*)>(.*)</svg>%s*$")
  if not root then return nil end
  local attributes = {}
  for name, _, value in root:gmatch("([%w:_-]+)%s*=%s*([\"'])(.-)%2") do
    table.insert(attributes, { name, value })
  end
  return attributes, (body:gsub("%s+$", ""))
end

function M.ids(attributes, body)
  local ids = {}
  for _, attribute in ipairs(attributes) do
    if attribute[1] == "id" then table.insert(ids, attribute[2]) end
  end
  for _, id in body:gmatch("%sid%s*=%s*([\"'])(.-)%1") do table.insert(ids, id) end
  return ids
end

-- Puts a prefix before every id and every reference to one.
function M.with_prefix(body, prefix)
  body = body:gsub("(%sid%s*=%s*[\"'])", "%1" .. prefix)
  body = body:gsub("(href%s*=%s*[\"']#)", "%1" .. prefix)
  return (body:gsub("(url%(%s*[\"']?#)", "%1" .. prefix))
end

-- Replaces the palette's colours by the page's, so that a figure follows light and dark.
function M.with_page_colours(body)
  return (body:gsub("#%x%x%x%x%x%x%f[%X]", function(colour)
    local name = PALETTE[colour:lower()]
    return name and ("var(%s, %s)"):format(name, colour:lower())
  end))
end

-- Rules of a figure's style element count inside this figure only.
local function with_scoped_style(body, scope)
  return (body:gsub("(<style[^>]*>)(.-)(</style>)", function(open, rules, close)
    rules = rules:gsub("<!%[CDATA%[", ""):gsub("%]%]>", "")
    return ('%s[data-figure="%s"] {%s}%s'):format(open, scope, rules, close)
  end))
end

local function width_of(attributes)
  for _, attribute in ipairs(attributes) do
    if attribute[1] == "width" and attribute[2]:match("^[%d.]+%a*$") then
      return attribute[2]:match("%a$") and attribute[2] or attribute[2] .. "px"
    end
  end
  for _, attribute in ipairs(attributes) do
    local width = attribute[1] == "viewBox" and attribute[2]:match("^%s*%S+%s+%S+%s+(%S+)")
    if width then return width .. "px" end
  end
end

-- The element as the page has it: as wide as the column allows, never wider than drawn.
-- `name` is unique on the page; `extra` holds the attributes that give it a name for everyone.
function M.inline(attributes, body, name, extra)
  local replaced = { width = true, height = true, style = true, role = true, class = true, version = true }
  local parts = { ('<svg data-figure="%s" role="img"'):format(escape(name)) }
  for _, attribute in ipairs(extra) do
    replaced[attribute[1]] = true
    table.insert(parts, ('%s="%s"'):format(attribute[1], escape(attribute[2])))
  end
  for _, attribute in ipairs(attributes) do
    if not replaced[attribute[1]] then table.insert(parts, ('%s="%s"'):format(attribute[1], attribute[2])) end
  end
  table.insert(parts, ('width="100%%" style="max-width: %s; height: auto">'):format(width_of(attributes)))
  return table.concat(parts, " ") .. with_scoped_style(body, name) .. "</svg>"
end

function M.has_view_box(attributes)
  for _, attribute in ipairs(attributes) do
    if attribute[1] == "viewBox" then return true end
  end
  return false
end

return M
