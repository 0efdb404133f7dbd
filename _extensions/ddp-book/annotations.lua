-- Annotations of quoted code: a definition list whose terms are the whole text of a line.

local import = ...
local svg = import "svg"

local M = {}

local function trim(text) return text:match("^%s*(.-)%s*$") end

-- A term is the text of a line, or of several that follow each other: the last one is annotated.
local function term_lines(term, fail)
  local wanted = {}
  for _, inline in ipairs(term) do
    if inline.t == "Code" then
      table.insert(wanted, trim(inline.text))
    elseif inline.t ~= "Space" and inline.t ~= "SoftBreak" then
      local text = pandoc.utils.stringify(term)
      fail(("the annotated line must be inline code, in backticks: %s"):format(text), text)
    end
  end
  return wanted
end

-- Whether the non-blank lines that end at `number` are the wanted ones.
local function ends_at(lines, number, wanted)
  for position = #wanted, 1, -1 do
    while position < #wanted and number > 0 and trim(lines[number]) == "" do number = number - 1 end
    if number < 1 or trim(lines[number]) ~= wanted[position] then return false end
    number = number - 1
  end
  return true
end

local function annotated_line(lines, term, place, fail)
  local wanted, found = term_lines(term, fail), {}
  local text = wanted[#wanted]
  for number in ipairs(lines) do
    if ends_at(lines, number, wanted) then table.insert(found, number) end
  end
  if #found == 1 then return found[1] end
  if #found == 0 then fail(("no line `%s` in %s"):format(text, place), text) end
  fail(("%d lines read `%s`: put the line above it in front, as in `line above` `%s`"):format(#found, text, text), text)
end

-- A list of { line, definition } in the order of the lines; `place` says what the lines are.
function M.find(div, lines, place, fail)
  local found, taken = {}, {}
  for _, block in ipairs(div.content) do
    if block.t ~= "DefinitionList" then fail("it may hold nothing but a definition list of annotations") end
    for _, item in ipairs(block.content) do
      local term, definitions = item[1], item[2]
      local line = annotated_line(lines, term, place, fail)
      local text = pandoc.utils.stringify(term)
      if taken[line] then fail(("`%s` is annotated twice"):format(text), text) end
      local kind = #definitions == 1 and #definitions[1] == 1 and definitions[1][1].t
      if kind ~= "Plain" and kind ~= "Para" then
        fail(("the annotation of `%s` must be one paragraph"):format(text), text)
      end
      taken[line] = true
      table.insert(found, { line = line, definition = definitions[1] })
    end
  end
  table.sort(found, function(one, other) return one.line < other.line end)
  return found
end

-- The code's HTML, whose lines have the names `cell`-1, `cell`-2 …, with its notes: beside it or below it, as
-- there is room. A line with a note has its number, and the note begins with a link to the line.
function M.beside(html, notes, lines, cell)
  local function raw(text) return pandoc.RawBlock("html", text) end
  if #notes == 0 then return pandoc.Blocks { raw(html) } end
  local blocks = pandoc.Blocks {}
  for number, note in ipairs(notes) do
    local id = (' id="%s-%d"'):format(cell, note.line)
    html = html:gsub(id:gsub("%-", "%%-"), ('%%0 data-note="%d"'):format(number))
    local opening = '<div><dt><a href="#%s-%d">%d<span class="visually-hidden">: <code>%s</code></span></a></dt><dd>'
    blocks:insert(raw(opening:format(cell, note.line, number, svg.escape(trim(lines[note.line])))))
    blocks:insert(pandoc.Plain(note.definition[1].content))
    blocks:insert(raw "</dd></div>")
  end
  blocks:insert(1, raw(html .. '\n<dl class="notes">'))
  blocks:insert(raw "</dl>")
  return pandoc.Blocks { pandoc.Div(blocks, { class = "annotated" }) }
end

return M
