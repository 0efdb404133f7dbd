-- `.parity`: a section of the table that the tests of parity with torch write.

local import = ...
local project = import "project"
local sorted_keys = import "sorted_keys"
local make_table = import "table"

local TABLE = "tests/parity.json"

local function plain(markdown) return pandoc.utils.blocks_to_inlines(pandoc.read(markdown, "markdown").blocks) end

-- Lines do not break inside of a tolerance such as atol 1e-6.
local function tolerance(text)
  return plain((text:gsub(" (%d)", "\u{a0}%1"))):walk {
    Str = function(str)
      if str.text:find("%de%-%d") then return pandoc.Span({ str }, { class = "nobreak" }) end
    end,
  }
end

-- What is shown, and under it the name of the test, linked to its file.
local function shown(text, row)
  local path, name = row.test:match("^(.-)::(.+)$")
  local test = project.source_link({ pandoc.Code(name) }, path)
  return pandoc.Blocks { pandoc.Plain(plain(text)), pandoc.Div({ pandoc.Plain(test) }, { class = "shown-by" }) }
end

-- Columns that say the same in each row, or nothing, are left out.
local function listed(section)
  local with_tolerance, differ = false, false
  for _, row in ipairs(section) do
    with_tolerance = with_tolerance or row.tolerance ~= ""
    differ = differ or row.torch ~= "yes" or row.miniddp ~= "yes"
  end
  local function chosen(behaviour, torch, miniddp, tolerated)
    local cells = pandoc.List { behaviour }
    if differ then cells:extend { torch, miniddp } end
    if with_tolerance then cells:insert(tolerated) end
    return cells
  end
  local rows = pandoc.List(section):map(function(row)
    return chosen(shown(row.behaviour, row), plain(row.torch), plain(row.miniddp), tolerance(row.tolerance))
  end)
  return chosen(differ and "Behaviour" or "Both do this", "torch", "miniddp", "Tolerance"), rows
end

-- The rows by a text of theirs; the texts in the order in which they come.
local function grouped(section, text_of)
  local texts, groups = {}, {}
  for _, row in ipairs(section) do
    local text = text_of(row)
    if not groups[text] then
      groups[text] = {}
      table.insert(texts, text)
    end
    table.insert(groups[text], row)
  end
  return texts, groups
end

-- One row for all behaviours of which miniddp does the same: what, and how many.
local function counted(section)
  local rows = {}
  local texts, groups = grouped(section, function(row) return row.miniddp end)
  for _, text in ipairs(texts) do
    table.insert(rows, { shown(text, groups[text][1]), tostring(#groups[text]) })
  end
  return { "miniddp", "Number" }, rows
end

-- "passes 2, refused 1: 3 in all", by the text before the first comma or colon.
local function sum(section)
  local texts, groups = grouped(section, function(row) return row.miniddp:match("^[^,:]+") end)
  for i, text in ipairs(texts) do texts[i] = text .. " " .. #groups[text] end
  return pandoc.Para(("%s: %d in all"):format(table.concat(texts, ", "), #section))
end

return function(div, fail)
  local text = project.read(TABLE) or fail("there is no " .. TABLE .. " (make it with: make parity)")
  local found = pandoc.json.decode(text, false)
  local section = found.sections[div.attributes.section]
    or fail(("no such section in %s (it has: %s)"):format(TABLE, table.concat(sorted_keys(found.sections), ", ")))
  local count = div.classes:includes("counted")
  local header, rows = (count and counted or listed)(section)
  local made = make_table(header, rows)
  made.bodies[1].row_head_columns = 0
  local note = pandoc.Div({ pandoc.Plain("Seen with torch " .. found.torch) }, { class = "provenance cpu" })
  local blocks = pandoc.Blocks { made, note }
  if count then blocks:insert(1, sum(section)) end
  return pandoc.Div(blocks, { class = "parity" })
end
