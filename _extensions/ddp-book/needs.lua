-- What quoted code needs to run by itself: the copy button puts it in front. Ours, because what resolves
-- Python's names (`symtable`, Jedi) runs in Python, and `quarto render` does without.

local import = ...
local python = import "python"
local sorted_keys = import "sorted_keys"
local source = import "statements"

local M = {}

local WORD = "%f[%w_.][%a_][%w_]*" -- not that of an attribute: `x.name`

local function add_words(set, text)
  for word in text:gmatch(WORD) do set[word] = true end
end

-- The code without comments and strings; of an f-string, what stands in its braces is kept.
local function without_text(code)
  code = code:gsub('""".-"""', '""')
  code = code:gsub('(%a?)"([^"\n]*)"', function(prefix, text)
    local braces = {}
    for brace in text:gmatch("%b{}") do table.insert(braces, brace:sub(2, -2)) end
    return prefix == "f" and "(" .. table.concat(braces, ", ") .. ")" or '""'
  end)
  return (code:gsub("#[^\n]*", ""))
end

-- The names that the code binds itself: what it assigns, loops over, takes as parameters.
local function bound(code)
  local set = {}
  for targets in ("\n" .. code):gmatch("\n%s*([%a_][%w_, %(%)]*) =%f[^=]") do add_words(set, targets) end
  for name in code:gmatch("([%a_][%w_]*)%s*:=") do set[name] = true end
  for targets in code:gmatch("%f[%w_]as%s+%(?([%a_][%w_, ]*)") do add_words(set, targets) end
  for parameters in code:gmatch("%f[%w_]lambda%s+([^:]*):") do add_words(set, parameters) end
  for targets in code:gmatch("%f[%w_]for%s+([%w_,%s%(%)]-)%s+in%f[%W]") do add_words(set, targets) end
  for name, parameters in code:gmatch("def%s+([%w_]+)%s*(%b())") do
    set[name] = true
    local flat = parameters:sub(2, -2):gsub("%b()", ""):gsub("%b[]", "")
    for parameter in flat:gmatch("[^,]+") do set[parameter:match("^[%s*]*([%a_][%w_]*)") or ""] = true end
  end
  return set
end

-- The set of names that the code takes from outside. A name that it binds anywhere counts as its own.
local function names_used(code)
  code = without_text(code)
  local set = {}
  add_words(set, (code:gsub("([%(,]%s*)[%a_][%w_]*=%f[^=]", "%1"))) -- keyword arguments are not names
  for name in pairs(bound(code)) do set[name] = nil end
  for name in code:gmatch("%f[%w_]global%s+([%w_]+)") do set[name] = true end
  return set
end

local function uses_any(used, names)
  for name in names:gmatch(WORD) do
    if used[name] then return true end
  end
  return false
end

-- The import statements, as they stand in the file, of which a name is used.
local function imports(statements, used)
  local found = {}
  for _, statement in ipairs(statements) do
    local names = statement.indent == 0 and statement.code:match("^%f[%a]from%s.-%simport(.*)")
      or statement.code:match("^import%s(.*)")
    if names and (uses_any(used, names) or statement.code:find("__future__", 1, true)) then
      table.insert(found, statement.code)
    end
  end
  return found
end

-- What is defined at the top level, in the order of the file: { first, code, names, is_value }.
local function top_level(text, lines, statements)
  local found = {}
  local function add(part, names, is_value)
    local code = table.concat(lines, "\n", part.first, part.last)
    table.insert(found, { first = part.first, code = code, names = names, is_value = is_value })
  end
  for _, definition in ipairs(python.definitions(text, lines)) do
    if definition.indent == 0 then add(definition, definition.path, definition.kind == "value") end
  end
  for _, statement in ipairs(statements) do
    local several = statement.indent == 0 and statement.text:match("^([%a_][%w_]*,[%w_, ]*)=%f[^=]")
    if several then add(statement, several, true) end
  end
  table.sort(found, function(one, other) return one.first < other.first end)
  return found
end

-- Marks the definitions that are used, directly or by others, and adds what they use to `used`.
local function mark_needed(defined, used)
  local more
  repeat
    more = false
    for _, definition in ipairs(defined) do
      if not definition.needed and uses_any(used, definition.names) then
        definition.needed, more = true, true
        for name in pairs(names_used(definition.code)) do used[name] = true end
      end
    end
  until not more
end

-- "from miniddp.ring import split, wait", in several lines where one would be too long.
local function import_own(module, defined, used)
  local set = {}
  for _, definition in ipairs(defined) do
    for name in definition.names:gmatch(WORD) do set[name] = used[name] end
  end
  local wanted = sorted_keys(set)
  local line = ("from %s import %s"):format(module, table.concat(wanted, ", "))
  if #line > 100 then line = ("from %s import (\n    %s,\n)"):format(module, table.concat(wanted, ",\n    ")) end
  return #wanted > 0 and line or nil
end

-- The text to put before the quoted `code` of `path`, where it is the definition `quoted`. Names from
-- the same file are imported where it is a module; of a run, the definitions themselves are copied.
function M.of(text, path, quoted, code)
  local lines = source.split_lines(text)
  local statements = source.statements(text, lines)
  for _, statement in ipairs(statements) do
    statement.code = table.concat(lines, "\n", statement.first, statement.last)
  end
  local used, others = names_used(code), {}
  for _, definition in ipairs(top_level(text, lines, statements)) do
    if definition.names ~= quoted then table.insert(others, definition) end
  end
  local module = path:match("^src/(.+)%.py$") or path:match("^(tests/.+)%.py$")
  if not module then mark_needed(others, used) end
  local head = imports(statements, used)
  if module then table.insert(head, import_own(module:gsub("/__init__$", ""):gsub("/", "."), others, used)) end
  local before, was_value = table.concat(head, "\n"), nil
  for _, definition in ipairs(others) do
    if definition.needed then
      local gap = definition.is_value and (was_value and "\n" or "\n\n") or "\n\n\n"
      before = before .. (before ~= "" and gap or "") .. definition.code
      was_value = definition.is_value
    end
  end
  return before ~= "" and before .. "\n\n\n" or ""
end

return M
