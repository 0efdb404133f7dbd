-- Makes a drawn figure small without changing what it shows: short numbers, no groups and paths
-- that do nothing, and one class for each style that is used more than once.

local M = {}

-- Indents weigh; a line break between two tags means the same.
function M.without_indent(body) return (body:gsub("\n%s+", "\n")) end

local function rounded(number)
  return (("%.2f"):format(number):gsub("%.?0+$", ""))
end

-- In tags only: a number in a text is what the figure says.
local function with_short_numbers(body)
  return (body:gsub("<[^>]+>", function(tag)
    tag = tag:gsub("(%sd=\")([^\"]*)", function(name, path)
      return name .. path:gsub("%s+", " "):gsub("%s*(%a)%s*", "%1"):gsub("%s+$", "")
    end)
    return (tag:gsub("%d+%.%d%d%d+", rounded))
  end))
end

-- Paths that are neither filled nor stroked, and groups that say nothing about what is in them.
local function without_nothing(body)
  body = body:gsub('<path d="[^"]*"%s+style="fill: none"/>', "")
  body = body:gsub("(<text[^>]*) transform=\"rotate%(%-?0 [^\"]*\"", "%1")
  local open = {}
  body = body:gsub("<(/?)(g%f[%s>])([^>]*)>", function(closing, _, attributes)
    local kept
    if closing == "" then
      kept = attributes:match("%S") ~= nil
      table.insert(open, kept)
    else
      kept = table.remove(open)
    end
    if not kept then return "" end
  end)
  return (body:gsub("\n%s*\n+", "\n"))
end

local function with_classes(body, prefix)
  local times, names, rules = {}, {}, {}
  for style in body:gmatch('%sstyle="([^"]*)"') do times[style] = (times[style] or 0) + 1 end
  body = body:gsub('(%s)style="([^"]*)"', function(space, style)
    if times[style] < 2 then return nil end
    if not names[style] then
      names[style] = prefix .. (#rules + 1)
      table.insert(rules, (".%s { %s }"):format(names[style], style))
    end
    return ('%sclass="%s"'):format(space, names[style])
  end)
  if #rules == 0 then return body end
  return "<style>" .. table.concat(rules, "\n") .. "</style>" .. body
end

-- `prefix` begins the name of every class.
function M.figure(body, prefix)
  body = without_nothing(with_short_numbers(body))
  return with_classes(M.without_indent(body), prefix)
end

return M
