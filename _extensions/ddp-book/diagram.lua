-- `.diagram`: an SVG of vis/ as part of the page; with `table`, drawn from what others measured. tests/book/tools/test_vis.py says how one is drawn.

local import = ...
local figure = import "figure"
local measurement = import "measurement"
local project = import "project"
local svg = import "svg"

local M = {}

local shown = {} -- on this page so far

-- The SVG at that path as an element of the page.
function M.svg(path, fail)
  if shown[path] then fail("this diagram is on the page already: refer to it instead") end
  shown[path] = true
  local text = project.read(path) or fail("no such file: " .. path)
  local stem = path:match("([^/]+)%.svg$") or fail(path .. " is not an .svg file")
  for _, tag in ipairs { "title", "desc" } do
    local element = ('<%s id="%s-%s">'):format(tag, stem, tag)
    if not text:find(element, 1, true) then fail(("%s has no %s"):format(path, element)) end
  end
  local label = ("%s-title %s-desc"):format(stem, stem)
  return svg.element(text, path, "aria-labelledby", label, fail)
end

function M.diagram(div, fail)
  local html = M.svg(div.attributes.src or fail('expected src="vis/NAME.svg"'), fail)
  local tables = div.attributes.table and measurement.find(div.attributes, fail) or pandoc.List {}
  local content = figure(pandoc.Blocks { pandoc.RawBlock("html", html) }, div, fail)
  if #tables > 0 then return pandoc.Div(content .. tables:map(measurement.badge), { class = "run" }) end
  return #div.content > 0 and content or pandoc.Div(content, { class = "diagram" })
end

return M
