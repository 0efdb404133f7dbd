-- Finds definitions in Python source by name.

local import = ...
local source = import "statements"
local split_lines, statements = source.split_lines, source.statements

local M = {}

local NOT_NAMES = { ["else"] = true, try = true, finally = true, except = true, lambda = true }

-- The name that a statement defines, and whether it opens a block of its own.
local function defined(code)
  local name = code:match("^async%s+def%s+([%w_]+)") or code:match("^def%s+([%w_]+)")
  if name then return name, "function" end
  name = code:match("^class%s+([%w_]+)")
  if name then return name, "class" end
  name = code:match("^([%a_][%w_]*)%s*=%f[^=]") or code:match("^([%a_][%w_]*)%s*:")
  if name and not NOT_NAMES[name] then return name, "value" end
end

-- The last line of the block that the statement at `position` opens.
local function block_end(found, position)
  local last = found[position].last
  for next = position + 1, #found do
    if found[next].indent <= found[position].indent then break end
    last = found[next].last
  end
  return last
end

-- The lines of the string that says what a definition is: the first of its body, or below a value.
local function string_after(found, position, same_indent)
  local owner, body = found[position], found[position + 1]
  if not (body and body.text:match("^r?\"\"\"")) or (body.indent == owner.indent) ~= same_indent then return nil end
  return { body.first, body.last }
end

-- Every definition: { path ("SimpleDDP.no_sync"), kind, first, last, indent }, with the last line of its
-- signature, `head`, and the lines of the string `about` it.
local function find_definitions(text, lines)
  local found, list, open, decorator = statements(text, lines), {}, {}, nil
  for position, statement in ipairs(found) do
    while #open > 0 and open[#open].indent >= statement.indent do table.remove(open) end
    local owner = open[#open]
    local name, kind = defined(statement.text)
    if statement.text:sub(1, 1) == "@" then
      decorator = decorator or statement.first
    else
      if name and not (kind == "value" and owner and owner.kind == "function") then
        local definition = {
          path = owner and owner.path .. "." .. name or name,
          kind = kind,
          inside_function = owner ~= nil and (owner.kind == "function" or owner.inside_function),
          first = kind ~= "value" and decorator or statement.first,
          last = kind == "value" and statement.last or block_end(found, position),
          indent = statement.indent,
          head = statement.last,
          about = string_after(found, position, kind == "value"),
        }
        if kind ~= "value" then table.insert(open, definition) end
        table.insert(list, definition)
      end
      decorator = nil
    end
  end
  return list
end

local known = {} -- text of a file → its definitions: a page quotes the same files again and again

function M.definitions(text, lines)
  known[text] = known[text] or find_definitions(text, lines)
  return known[text]
end

-- Marks the lines of a docstring and the blank ones after it, unless nothing else would be left.
local function drop_docstring(part, lines, dropped)
  if part.kind == "value" or not part.about or part.about[2] == part.last then return end
  for number = part.about[1], part.last do
    if number > part.about[2] and not lines[number]:match("^%s*$") then return end
    dropped[number] = true
  end
end

local function dedented(lines, first, last, indent, dropped)
  local margin, kept = (" "):rep(indent), {}
  for number = first, last do
    local line = lines[number]
    if line:sub(1, indent) == margin then line = line:sub(indent + 1) end
    if not dropped[number] then table.insert(kept, (line:gsub("%s+$", ""))) end
  end
  return kept
end

-- The names that can be quoted, in the order of the source.
function M.names(text)
  local names, known = {}, {}
  for _, definition in ipairs(M.definitions(text, split_lines(text))) do
    if not definition.inside_function and not known[definition.path] then
      known[definition.path] = true
      table.insert(names, definition.path)
    end
  end
  return names
end

-- Marks the lines of a class that are neither its head nor, unless left out, its docstring nor one of
-- the `members`. A problem if there is no such member.
local function drop_other_members(class, members, text, lines, without_docstring, dropped)
  for number = class.head + 1, class.last do dropped[number] = true end
  local function keep(first, last)
    for number = first, last do dropped[number] = nil end
  end
  if class.about and not without_docstring then keep(class.about[1], class.about[2]) end
  for name in members:gmatch("%S+") do
    local found = false
    for _, definition in ipairs(M.definitions(text, lines)) do
      if definition.path == class.path .. "." .. name then
        local blank = lines[definition.first - 1]:match("^%s*$") and definition.first - 1 > class.head
        keep(definition.first - (blank and 1 or 0), definition.last)
        found = true
      end
    end
    if not found then return "no member " .. name end
  end
  local first = class.head + 1 -- after a docstring that is left out
  while dropped[first] do first = first + 1 end
  if lines[first]:match("^%s*$") then dropped[first] = true end
end

-- The lines that define `path`, dedented, of a class only the `members` ("__init__ forward") if they are
-- given; or nil and what is wrong.
function M.quote(text, path, without_docstring, members)
  local lines, parts = split_lines(text), {}
  for _, definition in ipairs(M.definitions(text, lines)) do
    if definition.path == path then table.insert(parts, definition) end
  end
  if #parts == 0 then return nil, "no such symbol" end
  if #parts > 1 then
    local places = {}
    for _, part in ipairs(parts) do table.insert(places, tostring(part.first)) end
    return nil, "defined more than once (lines " .. table.concat(places, ", ") .. ")"
  end
  local part, dropped = parts[1], {}
  if members then
    if part.kind ~= "class" then return nil, "members of what is no class" end
    local problem = drop_other_members(part, members, text, lines, without_docstring, dropped)
    if problem then return nil, problem end
  elseif without_docstring then
    drop_docstring(part, lines, dropped)
  end
  return dedented(lines, part.first, part.last, part.indent, dropped)
end

-- What the part of a file that a top-level statement belongs to is called.
local function part_name(statement, number, defined_before)
  local name, kind = defined(statement.text)
  if kind == "function" then return name .. "()" end
  if kind == "class" then return "class " .. name end
  if statement.text:match("^import%s") or statement.text:match("^from%s") then return "imports" end
  if number == 1 and statement.text:match("^r?\"\"\"") then return "top of the file" end
  return defined_before and "end of the file" or "constants"
end

-- A file in parts: { name, numbers (of its lines) }, without blank lines at a part's ends. A part is a
-- definition at the top level, the imports, or what else stands there.
function M.parts(text)
  local lines = split_lines(text)
  local starts, name, defined_before = {}, nil, false
  local top = {}
  for _, statement in ipairs(source.statements(text, lines)) do
    if statement.indent == 0 then table.insert(top, statement) end
  end
  for number, statement in ipairs(top) do
    local decorated = number > 1 and top[number - 1].text:sub(1, 1) == "@"
    local owner = number
    while top[owner].text:sub(1, 1) == "@" do owner = owner + 1 end
    name = part_name(top[owner], number, defined_before)
    defined_before = defined_before or name:match("%(%)$") ~= nil or name:match("^class ") ~= nil
    local first = statement.first
    while not decorated and first > 1 and lines[first - 1]:match("^#") do first = first - 1 end
    table.insert(starts, { first = first, name = name })
  end
  local parts, by_name = {}, {}
  for position, start in ipairs(starts) do
    local part = by_name[start.name]
    if not part then
      part = { name = start.name, numbers = {} }
      by_name[start.name] = part
      table.insert(parts, part)
    end
    local following = starts[position + 1]
    for number = start.first, following and following.first - 1 or #lines do table.insert(part.numbers, number) end
  end
  for _, part in ipairs(parts) do
    while lines[part.numbers[#part.numbers]]:match("^%s*$") do table.remove(part.numbers) end
  end
  return parts, lines
end

return M
