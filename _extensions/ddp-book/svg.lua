-- Makes an SVG part of a page.

local M = {}

-- Attributes of the root that the page decides.
local OWN = {
  width = true, height = true, style = true, role = true, version = true,
  ["aria-label"] = true, ["aria-labelledby"] = true,
}

-- The root element's attributes as a list of { name, value }, and what is inside; nil if it is no SVG.
function M.parse(text)
  text = text:gsub("<%?.-%?>", ""):gsub("<!%-%-.-%-%->", ""):gsub("<!DOCTYPE[^>]*>", "")
  local root, body = text:match("<svg(%s[^>]*)>(.*)</svg>%s*$")
  if not root then return nil end
  local attributes = {}
  for name, _, value in root:gmatch("([%w:_-]+)%s*=%s*([\"'])(.-)%2") do
    table.insert(attributes, { name, value })
  end
  return attributes, (body:gsub("\n%s+", "\n"):gsub("%s+$", ""))
end

function M.ids(body)
  local ids = {}
  for _, id in body:gmatch("%sid%s*=%s*([\"'])(.-)%1") do table.insert(ids, id) end
  return ids
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
  local escaped = text:gsub('[&<>"]', { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" })
  local parts = { ('<svg role="img" %s="%s"'):format(name, escaped) }
  for _, attribute in ipairs(attributes) do
    local quoted = attribute[2]:gsub('"', "&quot;")
    if not OWN[attribute[1]] then table.insert(parts, ('%s="%s"'):format(attribute[1], quoted)) end
  end
  table.insert(parts, ('width="100%%" style="%s">'):format(style_of(attributes)))
  return table.concat(parts, " ") .. body .. "</svg>"
end

return M
