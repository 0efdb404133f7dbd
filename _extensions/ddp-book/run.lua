-- `.run`: the recorded outputs of a cell, with a line that says where they come from, and one for
-- each table of what others measured that is in them.

local import = ...
local figure = import "figure"
local measurement = import "measurement"
local output = import "output"
local provenance = import "provenance"
local recording = import "recording"
local tabs = import "tabs"

return function(div, fail)
  local function alt_of()
    local alt = div.attributes["fig-alt"] or ""
    return alt ~= "" and alt or fail('its output is a figure: say what it shows with fig-alt="…"')
  end
  local found = recording.with_cell(div.attributes.name, div.attributes.kind, div.attributes.cell, fail)
  local function blocks_of(one)
    local blocks = output.blocks(one.cell, alt_of, fail)
    if #blocks == 0 then fail("the cell has no output in " .. one.recording.path) end
    return blocks
  end
  local function badge_of(one) return provenance.badge(one.recording, div.attributes.cell) end
  local content, below = tabs(found, blocks_of, badge_of)
  content = figure(content, div, fail) .. below
  if div.attributes.table then content:extend(measurement.find(div.attributes, fail):map(measurement.badge)) end
  return pandoc.Div(content, { class = "run" })
end
