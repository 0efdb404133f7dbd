-- `.measured`: a table or a figure of what others measured, with a line that says who, and on what.
-- `.measurements`: where each table comes from.

local import = ...
local chart = import "chart"
local figure = import "figure"
local fold = import "fold"
local make_table = import "table"
local measurement = import "measurement"
local output = import "output"
local project = import "project"

local M = {}

local FACTS = { "measured", "hardware", "software", "date", "authors", "caveat" }
local SOURCE = { "read", "path", "commit", "sha256", "licence" }
local OPTIONAL = { path = true, commit = true, sha256 = true, caveat = true }

local function words(text)
  local found = pandoc.List {}
  for word in (text or ""):gmatch("%S+") do found:insert(word) end
  return found
end

-- Each line of a chart has the rows that agree in the columns `by`, which name it.
local function drawn(tables, given, fail)
  local lines, by_label, first = {}, {}, tables[1]
  for _, one in ipairs(tables) do
    for _, row in ipairs(one.rows) do
      local x, y = tonumber(row[given.x]), tonumber(row[given.y])
      local label = table.concat(words(given.by):map(function(column) return row[column] end), " ")
      by_label[label] = by_label[label] or { label = label, points = {} }
      if x and y and #by_label[label].points == 0 then table.insert(lines, by_label[label]) end
      if x and y then table.insert(by_label[label].points, { x, y }) end
    end
  end
  local function show(x) return measurement.shown(("%.15g"):format(x), first.units[given.x]) end
  local picture = chart(lines, first.headings[given.x], first.headings[given.y], show, tonumber(given.mark))
  if not picture then fail("a figure needs numbers at two values of " .. given.x) end
  return output.figure(picture, given["fig-alt"] or fail('it is a figure: say what it shows with fig-alt="…"'), fail)
end

local function listed(tables, given)
  local columns, rows = given.columns and words(given.columns) or tables[1].columns, pandoc.List {}
  for _, one in ipairs(tables) do
    rows:extend(one.rows:map(function(row)
      return columns:map(function(column) return measurement.shown(row[column], one.units[column]) end)
    end))
  end
  return make_table(columns:map(function(column) return tables[1].headings[column] end), rows)
end

function M.measured(div, fail)
  local tables = measurement.find(div.attributes, fail)
  local shown = (div.attributes.y and drawn or listed)(tables, div.attributes, fail)
  return pandoc.Div(figure(pandoc.Blocks { shown }, div, fail) .. tables:map(measurement.badge), { class = "run" })
end

-- A table of what sources.toml says about a table, with links.
local function facts(one, keys)
  local rows = pandoc.List {}
  for _, fact in ipairs(keys) do
    local text = one.source(fact, OPTIONAL[fact])
    if fact == "authors" then text = pandoc.Inlines { pandoc.Link(text, one.source "address") } end
    local repository = fact == "commit" and one.source("address"):match("^https://github%.com/[^/#]+/[^/#]+")
    if text and repository then text = pandoc.Inlines { pandoc.Link(text, repository .. "/tree/" .. text) } end
    if text then rows:insert { fact:gsub("^%l", string.upper), text } end
  end
  return rows
end

local function largest(one, column)
  local most = one.rows[1][column]
  for _, row in ipairs(one.rows) do
    if (tonumber(row[column]) or 0) > (tonumber(most) or 0) then most = row[column] end
  end
  return most
end

-- Markdown, so that a name of code looks like code.
local function title_of(one) return pandoc.utils.blocks_to_inlines(pandoc.read(one.source "title").blocks) end

function M.measurements(div, fail)
  div.content = pandoc.Blocks {}
  local collectives, others = pandoc.List {}, pandoc.List {}
  local names = pandoc.List(project.list("measurements", "%.csv$"))
  for _, file in ipairs(project.list("measurements/traces", "%.csv$")) do names:insert("traces/" .. file) end
  for _, name in ipairs(names) do
    local one = measurement.read(name:gsub("%.csv$", ""), fail)
    local file = name:match("[^/]+$")
    local shown = facts(one, FACTS)
    local download = pandoc.Link(file, project.link(one.path), "", { download = file })
    shown:insert { "Table", pandoc.Inlines { download, pandoc.Str((", %d rows"):format(#one.rows)) } }
    div.content:extend { pandoc.Header(2, title_of(one), pandoc.Attr(one.name)), make_table(nil, shown, "facts") }
    div.content:extend(fold(pandoc.Blocks { make_table(nil, facts(one, SOURCE), "facts") }, "Where exactly", "folded"))
    local title = pandoc.Inlines { pandoc.Link(title_of(one), "#" .. one.name) }
    if one.columns:includes "busbw_gb_per_s" then
      collectives:insert { title, largest(one, "busbw_gb_per_s") }
    else
      others:insert { title, one.source "hardware" }
    end
  end
  if #others > 0 then div.content:insert(1, make_table({ "Training, and parts of it", "Hardware" }, others)) end
  if #collectives > 0 then
    div.content:insert(1, make_table({ "Collectives", "Largest bus bandwidth (GB/s)" }, collectives))
  end
  return div
end

return M
