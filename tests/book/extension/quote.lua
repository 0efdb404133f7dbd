-- pandoc lua quote.lua EXTENSION FILE: what the extension quotes for each name of a Python file, as JSON.

local extension, path = arg[1], arg[2]

local function import(name)
  return assert(loadfile(extension .. "/" .. name .. ".lua"))(_ENV.import)
end
_ENV.import = import

local python = import "python"
local text = io.open(path, "rb"):read("a"):gsub("\r\n", "\n")
local quotes = {}
for _, name in ipairs(python.names(text)) do
  local lines, problem = python.quote(text, name)
  quotes[name] = lines and table.concat(lines, "\n") or { problem = problem }
end
print(pandoc.json.encode(quotes))
