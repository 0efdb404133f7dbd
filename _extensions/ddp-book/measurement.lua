-- What others measured: the tables of measurements/, and where each comes from.

local import = ...
local project = import "project"
local stringify = pandoc.utils.stringify

local M = {}

local APPENDIX = "appendix/measurements.qmd"
local PREFIXES = { [0] = "B", "KiB", "MiB", "GiB" }

-- The text of a key in a section of the folder's sources.toml.
local function told(folder, section, key, fail)
  local sources = folder .. "/sources.toml"
  local text = project.read(sources) or fail("there is no " .. sources)
  local body = ("\n" .. text .. "\n["):match("\n%[" .. section .. "%](\n.-)\n%[")
  if not body then fail(("%s has no [%s]"):format(sources, section)) end
  return body:match("\n" .. key .. ' = "(.-)"') or fail(("[%s] of %s has no %s"):format(section, sources, key))
end

-- A table: its name and columns, the heading and the unit of each, and rows (column → text).
-- `source(key)` says where it comes from; with `optional` it gives nil for a key that is not there.
-- The table `traces/NAME` lies in that folder, with a sources.toml of its own.
function M.read(named, fail)
  local path = ("measurements/%s.csv"):format(named)
  local folder, name = path:match("^(.*)/([^/]*)%.csv$")
  local known = table.concat(project.list(folder, "%.csv$"), ", "):gsub("%.csv", "")
  local text = project.read(path) or fail(("no such table: there is no %s (there are: %s)"):format(path, known))
  local csv = pandoc.utils.to_simple_table(pandoc.read(text, "csv").blocks[1])
  local one = { name = name, path = path, headings = {}, units = {}, rows = pandoc.List {} }
  one.columns = pandoc.List(csv.header):map(stringify)
  one.source = function(key, optional) return told(folder, name, key, optional and function() end or fail) end
  local there_are = (" (there are: %s)"):format(table.concat(one.columns, ", "))
  local strict = { __index = function(_, column) fail("no column " .. column .. there_are) end }
  for _, cells in ipairs(csv.rows) do
    local row = setmetatable({}, strict)
    for i, column in ipairs(one.columns) do row[column] = stringify(cells[i]) end
    one.rows:insert(row)
  end
  for _, column in ipairs(one.columns) do
    local heading = told(folder, "columns", column, fail)
    one.headings[column] = heading:match("^number %((.+)%)$") or heading
    one.units[column] = heading:match("%(([^()]+)%)$")
    local is_text = one.rows:find_if(function(row) return not tonumber(row[column]) end)
    if not one.units[column] and not is_text then fail(("%s: %s has no unit in %s/sources.toml"):format(path, column, folder)) end
  end
  return one
end

local function meets(row, condition, fail)
  local column, operator, wanted = condition:match("^%s*([%w_]+)%s*(>?=)%s*(.-)%s*$")
  if not column then fail("where: expected column=value or column>=number, not " .. condition) end
  if operator == "=" then return ("|" .. wanted .. "|"):find("|" .. row[column] .. "|", 1, true) end
  return (tonumber(row[column]) or -math.huge) >= (tonumber(wanted) or math.huge)
end

-- The tables that `table="one two"` names, with the rows that meet each condition of
-- `where="setup=a|b; size_bytes>=1024"`; at least one row in all.
function M.find(given, fail)
  local found, any = pandoc.List {}, false
  for name in (given.table or fail('expected table="name"')):gmatch("%S+") do
    local one = M.read(name, fail)
    for condition in (given.where or ""):gmatch("[^;]+") do
      one.rows = one.rows:filter(function(row) return meets(row, condition, fail) end)
    end
    found:insert(one)
    any = any or #one.rows > 0
  end
  return any and found or fail(('no row where="%s"'):format(given.where))
end

-- A cell as a page shows it: 33554432 bytes are 32 MiB, and 53.040, which some read as thousands, is 53.04.
function M.shown(cell, unit)
  local size, prefix = unit == "bytes" and math.tointeger(tonumber(cell)), 0
  if not size then return cell and (cell:gsub("^(%d+%.%d%d)0+$", "%1")) end
  while size >= 1024 and size % 1024 == 0 and prefix < 3 do size, prefix = size // 1024, prefix + 1 end
  return size .. "\u{a0}" .. PREFIXES[prefix]
end

-- "Measured by others · 8 × H100 · ", "NVIDIA", " · published 2025-12-04", and the table's entry in the appendix.
function M.origin(one)
  local read = one.source "read" == "original" and "" or ", read " .. one.source "read"
  local link = (project.page == APPENDIX and "" or project.link(APPENDIX)) .. "#" .. one.name
  return ("Measured by others · %s · "):format(one.source "hardware"), one.source "authors", " · " .. one.source "date" .. read, link
end

-- The line under a quote, linked to that entry and to the source.
function M.badge(one)
  local before, authors, after, link = M.origin(one)
  local line = { pandoc.Link(before, link), pandoc.Link(authors, one.source "address"), pandoc.Str(after) }
  return pandoc.Div({ pandoc.Plain { pandoc.Span(line) } }, pandoc.Attr("", { "provenance", "others" }))
end

return M
