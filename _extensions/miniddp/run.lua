-- `.run`: the recorded outputs of a cell, with a line that says where they come from.

local import = ...
local figure = import "figure"
local outputs = import "output"
local provenance = import "provenance"
local recording = import "recording"
local tabs = import "tabs"

-- The recordings that have the cell, as { kind, recording, cell }. A GPU recording may lag behind.
local function with_cell(div, fail)
  local name, cell_name = div.attributes.name, div.attributes.cell
  if not cell_name then fail("no cell is named") end
  local found, names = {}, {}
  for _, one in ipairs(recording.find(name, div.attributes.kind, fail)) do
    local cell = recording.cell(one, cell_name, fail)
    if cell then table.insert(found, { kind = one.kind, recording = one, cell = cell }) end
    names = recording.cell_names(one)
  end
  if #found > 0 then return found end
  fail(("no such cell in the recording (it has: %s)"):format(table.concat(names, ", ")))
end

return function(div, fail)
  local function alt_of()
    local alt = div.attributes["fig-alt"] or ""
    return alt ~= "" and alt or fail('its output is a figure: say what it shows with fig-alt="…"')
  end
  local found = with_cell(div, fail)
  local function blocks_of(one)
    local blocks = outputs(one.cell, alt_of, fail)
    if #blocks == 0 then fail("the cell has no output in " .. one.recording.path) end
    return blocks
  end
  local content
  if #found == 1 then
    content = figure(blocks_of(found[1]), div, fail)
    content:insert(provenance.badge(found[1].recording))
  else
    content = figure(tabs(found, function(one)
      local blocks = blocks_of(one)
      blocks:insert(provenance.badge(one.recording))
      return blocks
    end), div, fail)
  end
  return pandoc.Div(content, { class = "run" })
end
