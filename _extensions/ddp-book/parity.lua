-- `.parity`: a section of the table that the tests of parity with torch write.

local import = ...
local project = import "project"
local make_table = import "table"

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
  return block and block.content or pandoc.Inlines {}
end

-- What is shown, and under it the name of the test, linked to its file.
local function behaviour(row)
  local path, name = row.test:match("^(.-)::(.+)$")
  local test = project.source_link({ pandoc.Code(name) }, path)
  return pandoc.Blocks {
    pandoc.Plain(plain(row.behaviour)),
    pandoc.Div({ pandoc.Plain(test) }, { class = "shown-by" }),
  }
end

return function(div, fail)
  local found = read(fail)
  local rows, with_tolerance = {}, false
  for _, row in ipairs(section_of(found.sections, div.attributes.section, fail)) do
    with_tolerance = with_tolerance or row.tolerance ~= ""
    table.insert(rows, { behaviour(row), plain(row.torch), plain(row.miniddp), plain(row.tolerance) })
  end
  local header = { table.unpack(HEADER) }
  if not with_tolerance then
    for _, row in ipairs { header, table.unpack(rows) } do table.remove(row) end
  end
  local made = make_table(header, rows)
  made.bodies[1].row_head_columns = 0
  local note = pandoc.Div({ pandoc.Plain("Seen with torch " .. found.torch) }, { class = "provenance cpu" })
  return pandoc.Div({ made, note }, { class = "parity" })
end
