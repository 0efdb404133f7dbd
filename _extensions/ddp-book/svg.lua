-- Prepares an SVG file for being part of a page.

local import = ...
local compact = import "compact"

local M = {}

-- The colours of theme/book.css in light mode, as figures are drawn with them.
local PALETTE = {
  ["#2563eb"] = "--rank-0", ["#c2410c"] = "--rank-1", ["#15803d"] = "--rank-2", ["#a21caf"] = "--rank-3",
  ["#b45309"] = "--rank-4", ["#0e7490"] = "--rank-5", ["#be123c"] = "--rank-6", ["#4d7c0f"] = "--rank-7",
  ["#1b1f24"] = "--fg", ["#57606a"] = "--muted", ["#8b949e"] = "--line", ["#f6f8fa"] = "--surface",
  ["#ffffff"] = "--bg",
}

-- Attributes of the root that the page decides.
local OWN = {
  width = true, height = true, style = true, role = true, version = true,
  ["aria-label"] = true, ["aria-labelledby"] = true,
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
  return attributes, compact.without_indent(body:gsub("%s+$", ""))
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

local function value_of(attributes, name)
  for _, attribute in ipairs(attributes) do
    if attribute[1] == name then return attribute[2] end
  end
end

function M.has_view_box(attributes) return value_of(attributes, "viewBox") ~= nil end

-- As drawn; a number without a unit is pixels.
local function width_of(attributes)
  local width = value_of(attributes, "width") or ""
  if not width:match("^[%d.]+%a*$") then width = value_of(attributes, "viewBox"):match("^%s*%S+%s+%S+%s+(%S+)") end
  return width:match("%a$") and width or width .. "px"
end

-- The file's own style, and: as wide as the column allows, never wider than drawn, in the middle.
local function style_of(attributes)
  local own = value_of(attributes, "style") or ""
  local rules = { own ~= "" and (own:gsub(";%s*$", "")) or nil }
  for _, rule in ipairs { "display: block", "max-width: " .. width_of(attributes), "height: auto", "margin: 0 auto" } do
    if not own:find(rule:match("^[^:]+:"), 1, true) then table.insert(rules, rule) end
  end
  return table.concat(rules, "; ")
end

-- The element for a page; `name`, `text`: the attribute that says what is to be seen.
function M.inline(attributes, body, name, text)
  local parts = { ('<svg role="img" %s="%s"'):format(name, escape(text)) }
  for _, attribute in ipairs(attributes) do
    local quoted = attribute[2]:gsub('"', "&quot;")
    if not OWN[attribute[1]] then table.insert(parts, ('%s="%s"'):format(attribute[1], quoted)) end
  end
  table.insert(parts, ('width="100%%" style="%s">'):format(style_of(attributes)))
  return table.concat(parts, " ") .. body .. "</svg>"
end

return M
