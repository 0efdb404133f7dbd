-- Makes an SVG part of a page. How it fits the column, theme/book.css says.

local M = {}

-- Attributes of the root that the page decides.
local OWN = {
  class = true, width = true, height = true, style = true, role = true, version = true,
  ["aria-label"] = true, ["aria-labelledby"] = true,
}

-- What draws nothing, but runs, loads or leads away.
local HOSTILE = {
  "<script", "<foreignobject", "<iframe", "<animate", "<set[%s>]", "%son%a+%s*=", "javascript:", "@import",
  "href%s*=%s*[\"']%s*[^#\"'%s]", "url%(%s*[\"']?%s*[^#\"'%s]",
}

local function check(text, subject, fail)
  text = text:lower():gsub("[\"']data:image/png;", "#")
  for _, pattern in ipairs(HOSTILE) do
    local found = text:match(pattern .. "[^<>]*")
    if found then fail(("%s holds more than a picture: %s"):format(subject, found:sub(1, 40))) end
  end
end

function M.escape(text)
  return (text:gsub('[&<>"]', { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" }))
end

-- The element for a page of the file or figure `subject`, never wider than drawn; `name`, `label`: the
-- attribute that says what is to be seen.
function M.element(text, subject, name, label, fail)
  text = text:gsub("<%?.-%?>", ""):gsub("<!%-%-.-%-%->", ""):gsub("<!DOCTYPE[^>]*>", "")
  check(text, subject, fail)
  local root, body = text:match("<svg(%s[^>]*)>(.*)</svg>%s*$")
  if not root then fail(subject .. " is not an SVG") end
  local given, parts = {}, { ('<svg class="drawn" role="img" %s="%s"'):format(name, M.escape(label)) }
  for key, _, value in root:gmatch("([%w:_-]+)%s*=%s*([\"'])(.-)%2") do
    given[key] = value
    if not OWN[key] then table.insert(parts, ('%s="%s"'):format(key, (value:gsub('"', "&quot;")))) end
  end
  if not given.viewBox then fail(subject .. " has no viewBox") end
  local width = (given.width or ""):match("^[%d.]+%a*$") or given.viewBox:match("^%s*%S+%s+%S+%s+(%S+)")
  table.insert(parts, ('style="max-width: %s; %s">'):format(width:gsub("%d$", "%0px"), given.style or ""))
  return table.concat(parts, " ") .. body:gsub("\n%s+", "\n"):gsub("%s+$", "") .. "</svg>"
end

return M
