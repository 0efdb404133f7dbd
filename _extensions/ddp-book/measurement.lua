-- What others measured: the tables of measurements/, and where each comes from.

local import = ...
local project = import "project"

local M = {}

local SOURCES = "measurements/sources.toml"
local APPENDIX = "appendix/measurements.qmd"
local PREFIXES = { [0] = "B", "KiB", "MiB", "GiB" }

-- A map that fails for a key that it has not.
local function strict(map, what, fail)
  return setmetatable(map, { __index = function(_, key) fail(what:format(key)) end })
end

-- Section of sources.toml → key → text.
local function read_sources(fail)
  local found, section = strict({}, SOURCES .. " has no [%s]", fail), nil
  for line in (project.read(SOURCES) or fail("there is no " .. SOURCES)):gmatch("[^\n]+") do
    local name, key, value = line:match("^%[(.+)%]$"), line:match('^([%w_]+) = "(.*)"$')
    if name then
      section = strict({}, ("[%s] of %s has no %%s"):format(name, SOURCES), fail)
      found[name] = section
    elseif key then
      section[key] = value
    end
  end
  return found
end

-- A table: { name, source, columns (in order), headings, units, rows (column → text) }.
function M.read(name, fail)
  local path, sources = ("measurements/%s.csv"):format(name), read_sources(fail)
  local known = table.concat(project.list("measurements", "%.csv$"), ", "):gsub("%.csv", "")
  local text = project.read(path) or fail(("no such table: there is no %s (there are: %s)"):format(path, known))
  local csv = pandoc.utils.to_simple_table(pandoc.read(text, "csv").blocks[1])
  local one = { name = name, source = sources[name], headings = sources.columns, units = {}, rows = pandoc.List {} }
  one.columns = pandoc.List(csv.header):map(pandoc.utils.stringify)
  for _, cells in ipairs(csv.rows) do
    local row = strict({}, ("no column %%s (there are: %s)"):format(table.concat(one.columns, ", ")), fail)
    for i, column in ipairs(one.columns) do row[column] = pandoc.utils.stringify(cells[i]) end
    one.rows:insert(row)
  end
  for _, column in ipairs(one.columns) do
    one.units[column] = one.headings[column]:match("%(([^()]+)%)$")
    local is_text = one.rows:find_if(function(row) return not tonumber(row[column]) end)
    if not one.units[column] and not is_text then fail(("%s: %s has no unit in %s"):format(path, column, SOURCES)) end
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
-- `where="setup=a|b; size_bytes>=1024"`; one of them at least.
function M.find(attributes, fail)
  local found, count = pandoc.List {}, 0
  for name in (attributes.table or fail('expected table="name"')):gmatch("%S+") do
    local one = M.read(name, fail)
    for condition in (attributes.where or ""):gmatch("[^;]+") do
      one.rows = one.rows:filter(function(row) return meets(row, condition, fail) end)
    end
    found:insert(one)
    count = count + #one.rows
  end
  return count > 0 and found or fail(('no row where="%s"'):format(attributes.where or ""))
end

-- A cell as a page shows it: 33554432 bytes are 32 MiB.
function M.shown(cell, unit)
  local size, prefix = unit == "bytes" and math.tointeger(tonumber(cell)), 0
  if not size then return cell end
  while size >= 1024 and size % 1024 == 0 and prefix < 3 do size, prefix = size // 1024, prefix + 1 end
  return size .. "\u{a0}" .. PREFIXES[prefix]
end

-- Where a value comes from, in one line; `authors` as a page shows them.
function M.line(one)
  local source = one.source
  local read = source.read == "original" and "" or ", read " .. source.read
  return ("Measured by others · %s · %s · %s%s"):format(source.hardware, source.authors, source.date, read)
end

-- The table's entry in the appendix.
function M.link(one) return (project.page == APPENDIX and "" or project.link(APPENDIX)) .. "#" .. one.name end

-- The line under a quote, linked to that entry and to the source.
function M.badge(one)
  local told = M.line(one)
  local from, to = told:find(one.source.authors, 1, true)
  local line = pandoc.Inlines { pandoc.Link(told:sub(1, from - 1), M.link(one)) }
  line:extend { pandoc.Link(one.source.authors, one.source.address), pandoc.Str(told:sub(to + 1)) }
  return pandoc.Div({ pandoc.Plain { pandoc.Span(line) } }, pandoc.Attr("", { "provenance", "others" }))
end

return M
