-- The names in Python code: those that it reads from outside, those that it binds itself.

local import = ...
local source = import "statements"

local M = {}

-- The code with comments gone and strings emptied; and what stands in the braces of its f-strings.
local function without_text(code)
  local kept, braces, at = {}, {}, 1
  while true do
    local from, _, mark = code:find("([#\"'])", at)
    if not from then return table.concat(kept) .. code:sub(at), table.concat(braces, "\n") end
    local before = code:sub(at, from - 1)
    if mark == "#" then
      at = code:find("\n", from, true) or #code + 1
    else
      at = source.skip_string(code, from)
      local prefix = before:match("%f[%w_](%a%a?)$")
      if prefix then before = before:sub(1, -#prefix - 1) end
      if prefix and prefix:lower():find("f", 1, true) then
        for brace in code:sub(from, at - 1):gmatch("%b{}") do table.insert(braces, brace:sub(2, -2)) end
      end
      before = before .. '""'
    end
    table.insert(kept, before)
  end
end

local function add_names(set, list)
  for name in (list or ""):gmatch("%f[%w_.][%a_][%w_]*%f[^%w_.]") do set[name] = true end
end

local function add_parameters(set, list)
  local flat = list:sub(2, -2):gsub("%b()", ""):gsub("%b[]", ""):gsub("%b{}", "")
  for parameter in flat:gmatch("[^,]+") do set[parameter:match("^[%s*]*([%a_][%w_]*)") or ""] = true end
end

-- The targets of an assignment: "a, (b, c) = d = value" → "a, (b, c)  d", or nil.
function M.targets(code)
  code = without_text(code)
  local annotated = code:match("^%s*([%a_][%w_]*)%s*:")
  if annotated and annotated ~= "else" and annotated ~= "try" and annotated ~= "finally" then return annotated end
  local found, rest = "", code
  while true do
    local target, after = rest:match("^%s*([%w_,%s*%(%)]-)%s*[%+%-*/|&]*=%f[^=](.*)$")
    if not target or target == "" or target:find("[%w_]%s*%(") then return found ~= "" and found or nil end
    found, rest = found .. " " .. target, after
  end
end

-- What an import statement binds: a list of { name, start ("from x import" or "import"), what ("y as z") }.
function M.imported(code)
  local found = {}
  code = without_text(code):gsub("[%(%)\\\n]", " ")
  local start, list = code:match("^%s*(from%s+%S+%s+import)%s+(.*)$")
  if not start then start, list = code:match("^%s*(import)%s+(.*)$") end
  for what in (list or ""):gmatch("[^,]+") do
    what = what:gsub("%s+", " "):match("^ ?(.-) ?$")
    local name = what:match(" as ([%w_]+)$") or what:match("^[%w_]+")
    if name then table.insert(found, { name = name, start = start, what = what }) end
  end
  return found
end

local function bound(code)
  local set = {}
  local lines = source.split_lines(code)
  for _, statement in ipairs(source.statements(code, lines)) do
    local text = table.concat(lines, "\n", statement.first, statement.last)
    add_names(set, M.targets(text))
    for _, entry in ipairs(M.imported(text)) do set[entry.name] = true end
    set[text:match("^%s*class%s+([%w_]+)") or ""] = true
  end
  for name, parameters in code:gmatch("%f[%w_]def%s+([%w_]+)%s*(%b())") do
    set[name] = true
    add_parameters(set, parameters)
  end
  for targets in code:gmatch("%f[%w_]for%s+([%w_,%s*%(%)]-)%s+in%f[%W]") do add_names(set, targets) end
  for target in code:gmatch("%sas%s+([%w_]+)") do set[target] = true end
  for targets in code:gmatch("%sas%s+(%b())") do add_names(set, targets) end
  for parameters in code:gmatch("%f[%w_]lambda%s+([^:]*):") do add_parameters(set, "(" .. parameters .. ")") end
  for name in code:gmatch("([%a_][%w_]*)%s*:=") do set[name] = true end
  return set
end

-- The names that stand in the code, but not those of attributes and keyword arguments.
local function mentioned(code)
  local set, at, depth = {}, 1, 0
  while true do
    local from, to = code:find("[%w_]+", at)
    if not from then return set end
    for bracket in code:sub(at, from - 1):gmatch("[%(%)%[%]{}]") do
      depth = depth + (bracket:find("[%(%[{]") and 1 or -1)
    end
    local name = code:sub(from, to)
    local is_attribute = code:sub(from - 1, from - 1) == "."
    local is_keyword = depth > 0 and code:find("^%s*=[^=]", to + 1) and code:sub(at, from - 1):find("[%(,]%s*$")
    if not (is_attribute or is_keyword or name:find("^%d")) then set[name] = true end
    at = to + 1
  end
end

-- The set of names that the code, a definition or an assignment, takes from outside (and keywords).
-- A name that is bound anywhere in it counts as its own.
function M.used(code)
  local plain, braces = without_text(code)
  local set, own = mentioned(plain), bound(plain)
  for name in pairs(mentioned(braces)) do set[name] = true end
  for name in pairs(own) do set[name] = nil end
  for name in plain:gmatch("%f[%w_]global%s+([%w_]+)") do set[name] = true end
  return set
end

return M
