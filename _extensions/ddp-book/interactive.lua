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
local TIMELINE = "application/vnd.miniddp.timeline+json"

local loaded = {} -- what this page loads so far

-- JSON that cannot end the element it stands in.
local function embedded(data)
  local json = pandoc.json.encode(data):gsub("<", "\\u003c")
  return ('<script type="application/json">%s</script>'):format(json)
end

-- What the script takes over.
local function stage(stem, still, data)
  return pandoc.RawBlock("html", table.concat({
    ('<div class="stage" data-module="%s">'):format(stem),
    ('<div class="still">%s</div>'):format(still),
    data and embedded(data) or "",
    "<noscript><p>With JavaScript you can change what this shows.</p></noscript>",
    "</div>",
  }, "\n"))
end

-- The markup that loads a file of the book, once on a page.
local function load(path, markup)
  if loaded[path] then return pandoc.Blocks {} end
  loaded[path] = true
  return pandoc.Blocks { pandoc.RawBlock("html", markup:format(project.link(path))) }
end

local function style(path)
  return project.read(path) and load(path, '<link rel="stylesheet" href="%s">') or pandoc.Blocks {}
end

local function script(path) return load(path, '<script type="module" src="%s"></script>') end

-- The recorded timeline of a cell and its picture, or nil.
local function timeline_of(cell)
  for _, shown in ipairs(cell.outputs or {}) do
    local events = recording.bundle(shown, TIMELINE)
    if events then return events, recording.bundle(shown, "image/svg+xml") end
  end
end

local function badges(found)
  local blocks = pandoc.Blocks {}
  for _, one in ipairs(found) do blocks:insert(provenance.badge(one.recording)) end
  return blocks
end

-- A stage for each recorded timeline, with its picture as the still.
local function timeline_stages(found, stem, alt, fail)
  if alt == "" then fail('its output is a timeline: say what it shows with fig-alt="…"') end
  local function stage_of(one)
    local events, picture = timeline_of(one.cell)
    if not events then fail("the cell has no timeline in " .. one.recording.path) end
    return stage(stem, output.figure(picture or "", alt, fail).text, events)
  end
  if #found == 1 then return pandoc.Blocks { stage_of(found[1]) }, badges(found) end
  return tabs(found, function(one) return pandoc.Blocks { stage_of(one), provenance.badge(one.recording) } end), {}
end

-- One stage with the values of all recordings.
local function values_stage(found, stem, still, fail)
  local data = {}
  for _, one in ipairs(found) do
    local values = recording.cell_values(one.cell)
    if not next(values) then fail("the cell has neither a timeline nor values in " .. one.recording.path) end
    table.insert(data, { kind = one.kind, values = values })
  end
  return pandoc.Blocks { stage(stem, still, data) }, badges(found)
end

return function(div, fail)
  local given = div.attributes
  local path = given.src or fail('expected src="vis/NAME.js"')
  local stem = path:match("([^/]+)%.js$") or fail(path .. " is not a .js file")
  if not project.read(path) then fail("no such file: " .. path) end
  local still = path:gsub("%.js$", ".svg")

  local content, below = nil, {}
  if not given.run then
    content = pandoc.Blocks { stage(stem, diagram.svg(still, fail)) }
  else
    local found = recording.with_cell(given.run, given.kind, given.cell, fail)
    if timeline_of(found[1].cell) then
      content, below = timeline_stages(found, stem, given["fig-alt"] or "", fail)
    else
      content, below = values_stage(found, stem, diagram.svg(still, fail), fail)
    end
  end
  local styles = style(STYLE) .. style((path:gsub("%.js$", ".css")))
  content = styles .. figure(content, div, fail) .. below .. script(path)
  return pandoc.Div(content, { class = "interactive-frame" })
end
