-- `.diagram`: an SVG of vis/ as part of the page.

local import = ...
local figure = import "figure"
local project = import "project"
local svg = import "svg"

local M = {}

local shown = {} -- on this page so far

-- Names must differ between the diagrams of a page, so each starts with the file's.
local function check_ids(ids, stem, path, fail)
  local known = {}
  for _, id in ipairs(ids) do
    if id:sub(1, #stem + 1) ~= stem .. "-" then
      fail(('%s: id="%s" must start with "%s-"'):format(path, id, stem))
    end
    if known[id] then fail(('%s: id="%s" is used twice'):format(path, id)) end
    known[id] = true
  end
end

-- The name of the first element of that tag, which gets one where it has none.
local function label_id(body, tag, stem, path, fail)
  local attributes, text = body:match("<" .. tag .. "([^>]*)>(.-)</" .. tag .. ">")
  if not text or not text:match("%S") then fail(("%s has no <%s> with a text"):format(path, tag)) end
  local id = attributes:match("%sid%s*=%s*[\"'](.-)[\"']")
  if id then return body, id end
  id = stem .. "-" .. tag
  return body:gsub("<" .. tag .. "%f[%s>]", ('<%s id="%s"'):format(tag, id), 1), id
end

-- The SVG at that path as an element of the page.
function M.svg(path, fail)
  if shown[path] then fail("this diagram is on the page already: refer to it instead") end
  shown[path] = true
  local text = project.read(path) or fail("no such file: " .. path)
  local stem = path:match("([^/]+)%.svg$") or fail(path .. " is not an .svg file")
  local attributes, body = svg.parse(text)
  if not attributes then fail(path .. " is not an SVG") end
  if not svg.has_view_box(attributes) then fail(path .. " has no viewBox") end
  check_ids(svg.ids(body), stem, path, fail)
  local title, description
  body, title = label_id(body, "title", stem, path, fail)
  body, description = label_id(body, "desc", stem, path, fail)
  return svg.inline(attributes, body, "aria-labelledby", title .. " " .. description)
end

function M.diagram(div, fail)
  local html = M.svg(div.attributes.src or fail('expected src="vis/NAME.svg"'), fail)
  local content = figure(pandoc.Blocks { pandoc.RawBlock("html", html) }, div, fail)
  return #div.content > 0 and content or pandoc.Div(content, { class = "diagram" })
end

return M
