-- `.code`: quotes a symbol of the package, or a file, with annotations beside it.

local import = ...
local needs = import "needs"
local project = import "project"
local python = import "python"
local split_lines = import("statements").split_lines

local LANGUAGES = { py = "python", sh = "bash", yml = "yaml", md = "markdown" }

local function trim(text) return text:match("^%s*(.-)%s*$") end

-- The file that holds a module of the package, or nil.
local function module_file(module)
  local path = "src/" .. module:gsub("%.", "/")
  for _, candidate in ipairs { path .. ".py", path .. "/__init__.py" } do
    if project.read(candidate) then return candidate end
  end
end

-- The file that is quoted and, unless it is quoted whole, the name in it.
local function target(attributes, fail)
  if attributes.file then return attributes.file, attributes.symbol end
  local module, name = (attributes.symbol or ""):match("^([%w_.]+):([%w_.]+)$")
  if not module then fail('expected symbol="package.module:name" or file="path"') end
  return module_file(module) or fail("no such module: there is no src/" .. module:gsub("%.", "/") .. ".py"), name
end

local function quoted_lines(path, name, attributes, fail)
  local text = project.read(path) or fail("no such file: " .. path)
  if not name then return split_lines((text:gsub("%s+$", ""))) end
  local lines, problem = python.quote(text, name, attributes.docstring == "no")
  if lines then return lines end
  fail(("%s in %s (it has: %s)"):format(problem, path, table.concat(python.names(text), ", ")))
end

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

local function annotated_line(lines, term, path, fail)
  local wanted, found = term_lines(term, fail), {}
  local text = wanted[#wanted]
  for number in ipairs(lines) do
    if ends_at(lines, number, wanted) then table.insert(found, number) end
  end
  if #found == 1 then return found[1] end
  if #found == 0 then fail(("no line `%s` in the quoted part of %s"):format(text, path), text) end
  fail(("%d lines read `%s`: put the line above it in front, as in `line above` `%s`"):format(#found, text, text), text)
end

-- A list of { line, definition } in the order of the lines.
local function annotations(div, lines, path, fail)
  local found, taken = {}, {}
  for _, block in ipairs(div.content) do
    if block.t ~= "DefinitionList" then fail("it may hold nothing but a definition list of annotations") end
    for _, item in ipairs(block.content) do
      local term, definitions = item[1], item[2]
      local line = annotated_line(lines, term, path, fail)
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

return function(div, fail)
  local path, name = target(div.attributes, fail)
  local lines = quoted_lines(path, name, div.attributes, fail)
  local notes = annotations(div, lines, path, fail)
  local before = name and path:match("%.py$") and needs.of(project.read(path), path, name, table.concat(lines, "\n"))
  local definitions = {}
  for number, note in ipairs(notes) do
    lines[note.line] = ("%s  # <%d>"):format(lines[note.line], number)
    table.insert(definitions, note.definition)
  end
  local extension = path:match("%.(%w+)$") or "text"
  local code = pandoc.CodeBlock(table.concat(lines, "\n"), { class = LANGUAGES[extension] or extension })
  local source = pandoc.Plain(project.source_link({ pandoc.Str(path) }, path))
  local blocks = pandoc.Blocks { pandoc.Div({ source }, { class = "code-file" }), code }
  if #definitions > 0 then blocks:insert(pandoc.OrderedList(definitions)) end
  local attributes = before and before ~= "" and { before = before } or {}
  return pandoc.Div(blocks, pandoc.Attr(div.identifier, { "code" }, attributes))
end
