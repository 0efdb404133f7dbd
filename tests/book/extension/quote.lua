-- pandoc lua quote.lua EXTENSION < CASES: for each { text, name } the lines that the extension quotes, or why
-- it does not, as JSON; for { text } those of each of its names.

local extension = arg[1]

local function import(name)
  return assert(loadfile(extension .. "/" .. name .. ".lua"))(_ENV.import)
end
_ENV.import = import

local python = import "python"
local found = pandoc.List()
for _, case in ipairs(pandoc.json.decode(io.read("a"), false)) do
  local text, name = case[1], case[2]
  local quotes = {}
  for _, one in ipairs(name and { name } or python.names(text)) do
    local lines, problem = python.quote(text, one)
    quotes[one] = lines and table.concat(lines, "\n") or { problem = tostring(problem) }
  end
  found:insert(quotes)
end
print(pandoc.json.encode(found))
