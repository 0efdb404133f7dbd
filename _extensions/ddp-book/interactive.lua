-- `.interactive`: a diagram that a script of vis/ makes move; without JavaScript it is a still.

local import = ...
local diagram = import "diagram"
local figure = import "figure"
local output = import "output"
local project = import "project"
local provenance = import "provenance"
local recording = import "recording"
local tabs = import "tabs"

local STYLE = "vis/interactive.css"
local LINK, SCRIPT = '<link rel="stylesheet" href="%s">', '<script type="module" src="%s"></script>'
local TIMELINE = "application/vnd.miniddp.timeline+json"

local loaded = {} -- what this page loads so far

local STAGE = [[
<div class="stage" data-module="%s">
<div class="still">%s</div>
%s
<noscript><p>With JavaScript you can change what this shows.</p></noscript>
</div>]]

-- What the script takes over; `data` for it as JSON that cannot end the element it stands in.
local function stage(stem, still, data)
  local json = data and pandoc.json.encode(data):gsub("<", "\\u003c")
  local embedded = json and ('<script type="application/json">%s</script>'):format(json) or ""
  return pandoc.RawBlock("html", STAGE:format(stem, still, embedded))
end

-- The markup that loads a file of the book, if there is one, once on a page.
local function load(path, markup)
  if loaded[path] or not project.read(path) then return pandoc.Blocks {} end
  loaded[path] = true
  return pandoc.Blocks { pandoc.RawBlock("html", markup:format(project.link(path))) }
end

-- The recorded timeline of a cell and its picture, or nil.
local function timeline_of(cell)
  for _, shown in ipairs(cell.outputs or {}) do
    local events = recording.bundle(shown, TIMELINE)
    if events then return events, recording.bundle(shown, "image/svg+xml") end
  end
end

-- A stage for each recorded timeline, with its picture as the still.
local function timeline_stages(found, stem, alt, fail)
  local function stage_of(one)
    local events, picture = timeline_of(one.cell)
    if not events then fail("the cell has no timeline in " .. one.recording.path) end
    if alt == "" then fail('its output is a timeline: say what it shows with fig-alt="…"') end
    return pandoc.Blocks { stage(stem, output.figure(picture or "", alt, fail).text, events) }
  end
  return tabs(found, stage_of, function(one) return provenance.badge(one.recording, one.cell.metadata.name) end)
end

return function(div, fail)
  local given = div.attributes
  local path = given.src or fail('expected src="vis/NAME.js"')
  local stem = path:match("([^/]+)%.js$") or fail(path .. " is not a .js file")
  if not project.read(path) then fail("no such file: " .. path) end
  local still = path:gsub("%.js$", ".svg")

  local content, below = nil, {}
  if not given.run then
    content = pandoc.Blocks { stage(stem, diagram.svg(still, fail), given.fault and { fault = given.fault }) }
  else
    local found = recording.with_cell(given.run, given.kind, given.cell, fail)
    content, below = timeline_stages(found, stem, given["fig-alt"] or "", fail)
  end
  local styles = load(STYLE, LINK) .. load((path:gsub("%.js$", ".css")), LINK)
  content = styles .. figure(content, div, fail) .. below .. load(path, SCRIPT)
  return pandoc.Div(content, { class = "interactive-frame" })
end
