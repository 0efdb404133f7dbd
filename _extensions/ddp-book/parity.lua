-- `.parity`: a section of the table that the tests of parity with torch write.

local import = ...
local project = import "project"

local TABLE = "tests/parity.json"
local HEADER = { "Behaviour", "torch", "miniddp", "Tolerance" }

local function read(fail)
  local text = project.read(TABLE) or fail("there is no " .. TABLE .. " (make it with: make parity)")
  return pandoc.json.decode(text, false)
end

local function section_of(sections, name, fail)
  if sections[name] then return sections[name] end
  local names = {}
  for each in pairs(sections) do table.insert(names, each) end
  table.sort(names)
  fail(("no such section in %s (it has: %s)"):format(TABLE, table.concat(names, ", ")))
end

local function plain(markdown)
  local block = pandoc.read(markdown, "markdown").blocks[1]
  return { pandoc.Plain(block and block.content or {}) }
end

-- What is shown, and under it the name of the test, linked to its file.
local function behaviour(row)
  local path, name = row.test:match("^(.-)::(.+)$")
  local test = project.source_link({ pandoc.Code(name) }, path)
  local cell = plain(row.behaviour)
  table.insert(cell, pandoc.Div({ pandoc.Plain(test) }, { class = "shown-by" }))
  return cell
end

return function(div, fail)
  local found = read(fail)
  local rows, with_tolerance = {}, false
  for _, row in ipairs(section_of(found.sections, div.attributes.section, fail)) do
    with_tolerance = with_tolerance or row.tolerance ~= ""
    table.insert(rows, {
      behaviour(row), plain(row.torch), plain(row.miniddp), plain(row.tolerance),
    })
  end
  local aligns, widths, header = {}, {}, {}
  for column, title in ipairs(HEADER) do
    aligns[column], widths[column], header[column] = "AlignDefault", 0, { pandoc.Plain(title) }
  end
  if not with_tolerance then
    for _, row in ipairs { header, aligns, widths, table.unpack(rows) } do table.remove(row, 4) end
  end
  local made = pandoc.utils.from_simple_table(pandoc.SimpleTable({}, aligns, widths, header, rows))
  local note = pandoc.Div({ pandoc.Plain("Seen with torch " .. found.torch) }, { class = "provenance cpu" })
  return pandoc.Div({ made, note }, { class = "parity" })
end
