-- What quoted code needs to run by itself: the copy button puts it in front.

local import = ...
local names = import "names"
local python = import "python"
local source = import "statements"

local M = {}

local LINE_LENGTH = 100

-- The name by which a file can be imported: of the package, or of the tests in a clone of the book.
local function module_of(path)
  local name = path:match("^src/(.+)%.py$") or path:match("^(tests/.+)%.py$")
  return name and (name:gsub("/__init__$", ""):gsub("/", "."))
end

local function import_line(start, wanted)
  local line = start .. " " .. table.concat(wanted, ", ")
  if #line <= LINE_LENGTH then return line end
  return start .. " (\n    " .. table.concat(wanted, ",\n    ") .. ",\n)"
end

-- The import lines of those names that are used, as they stand in the file.
local function used_imports(statements, used)
  local found = {}
  for _, statement in ipairs(statements) do
    local wanted, start = {}, nil
    for _, entry in ipairs(statement.indent == 0 and names.imported(statement.code) or {}) do
      start = entry.start
      if used[entry.name] or start:find("__future__", 1, true) then table.insert(wanted, entry.what) end
    end
    if #wanted > 0 then table.insert(found, import_line(start, wanted)) end
  end
  return found
end

-- What is defined at the top level: { first, last, code, names, is_value }, in the order of the file.
local function top_level(text, lines, statements)
  local found = {}
  local function add(first, last, defined, is_value)
    table.insert(found, {
      first = first, code = table.concat(lines, "\n", first, last), names = defined, is_value = is_value,
    })
  end
  for _, definition in ipairs(python.definitions(text, lines)) do
    if definition.indent == 0 and definition.kind ~= "value" then
      add(definition.first, definition.last, { definition.path })
    end
  end
  for _, statement in ipairs(statements) do
    local targets = statement.indent == 0 and names.targets(statement.code)
    local defined = {}
    for name in (targets or ""):gmatch("[%a_][%w_]*") do table.insert(defined, name) end
    if #defined > 0 then add(statement.first, statement.last, defined, true) end
  end
  table.sort(found, function(one, other) return one.first < other.first end)
  return found
end

local function is_wanted(definition, used)
  for _, name in ipairs(definition.names) do
    if used[name] then return true end
  end
  return false
end

-- The definitions that are used, directly or by others; what they use is added to `used`.
local function needed(defined, used)
  local taken, more = {}, true
  while more do
    more = false
    for position, definition in ipairs(defined) do
      if not taken[position] and is_wanted(definition, used) then
        taken[position], more = true, true
        for name in pairs(names.used(definition.code)) do used[name] = true end
      end
    end
  end
  local found = {}
  for position, definition in ipairs(defined) do
    if taken[position] then table.insert(found, definition) end
  end
  return found
end

-- The text to put before the quoted `code` of `path`, where it is the definition `quoted`. Names from
-- the same file are imported where it is a module; of a run, the definitions themselves are copied.
function M.of(text, path, quoted, code)
  local lines = source.split_lines(text)
  local statements = source.statements(text, lines)
  for _, statement in ipairs(statements) do
    statement.code = table.concat(lines, "\n", statement.first, statement.last)
  end
  local defined, used, others, own = top_level(text, lines, statements), names.used(code), {}, {}
  for _, definition in ipairs(defined) do
    if definition.names[1] ~= quoted then table.insert(others, definition) end
  end
  local module, copied = module_of(path), {}
  if not module then copied = needed(others, used) end
  local head = used_imports(statements, used)
  local listed = {}
  for _, definition in ipairs(module and others or {}) do
    for _, name in ipairs(definition.names) do
      if used[name] and not listed[name] then table.insert(own, name) end
      listed[name] = true
    end
  end
  table.sort(own)
  if #own > 0 then table.insert(head, import_line("from " .. module .. " import", own)) end
  local before = table.concat(head, "\n")
  local was_value
  for _, definition in ipairs(copied) do
    local gap = definition.is_value and was_value and "\n" or definition.is_value and "\n\n" or "\n\n\n"
    before = before .. (before ~= "" and gap or "") .. definition.code
    was_value = definition.is_value
  end
  return before ~= "" and before .. "\n\n\n" or ""
end

return M
