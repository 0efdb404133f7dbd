-- pandoc lua hostile.lua EXTENSION CASES: the problem with each quote of [text, name], as JSON.

local extension, path = arg[1], arg[2]

local function import(name)
  return assert(loadfile(extension .. "/" .. name .. ".lua"))(_ENV.import)
end
_ENV.import = import

local python = import "python"
local problems = pandoc.List()
for _, case in ipairs(pandoc.json.decode(io.open(path, "rb"):read("a"), false)) do
  local lines, problem = python.quote(case[1], case[2])
  problems:insert(lines and "" or tostring(problem))
end
print(pandoc.json.encode(problems))
