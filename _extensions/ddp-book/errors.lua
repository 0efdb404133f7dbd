-- Says where something is wrong, and stops the build.

local import = ...
local project = import "project"

local M = {}

local IDENTIFYING = { "symbol", "file", "name", "cell", "run", "key", "src", "section", "package", "table", "from", "to" }
local seen = {} -- how often this page has used each label so far

local function escape(text) return (text:gsub("%p", "%%%0")) end

local function line_at(source, position)
  local _, newlines = source:sub(1, position - 1):gsub("\n", "")
  return newlines + 1
end

-- The position of the n-th `{…}` in the source that holds all the patterns and comes after `before`.
local function find_attributes(source, before, patterns, occurrence)
  for position, attributes in source:gmatch("(){([^{}]*)}") do
    local matches = source:sub(math.max(1, position - #before), position - 1) == before
    for _, pattern in ipairs(patterns) do
      matches = matches and (attributes .. " "):find(pattern)
    end
    if matches then occurrence = occurrence - 1 end
    if occurrence == 0 then return position end
  end
end

-- How a message names the element, and what to look for in the source.
local function describe(element, class)
  local label, patterns = "." .. class, { "%." .. escape(class) .. "%s" }
  for _, key in ipairs(IDENTIFYING) do
    local value = element.attributes[key]
    if value then
      label = ('%s %s="%s"'):format(label, key, value)
      table.insert(patterns, escape(key) .. "%s*=%s*[\"']?" .. escape(value) .. "[\"']?%s")
    end
  end
  if #patterns > 1 or element.t ~= "Span" then return label, "", patterns end
  local text = "[" .. pandoc.utils.stringify(element) .. "]"
  return label .. " " .. text, text, patterns
end

function M.stop(message)
  io.stderr:write((message:gsub("%s*\n%s*", " ")), "\n")
  os.exit(1)
end

-- A function `fail(message, near)` that stops the build. The message names the page, the line of the
-- element (of the text `near` below it, where that is given) and the element.
function M.of(element, class, page)
  page = page or project.page
  local label, before, patterns = describe(element, class)
  seen[label] = (seen[label] or 0) + 1
  local occurrence = seen[label]
  return function(message, near)
    local source = project.read(page) or ""
    local position = find_attributes(source, before, patterns, occurrence)
    local closer = position and near and source:find(near, position, true)
    local line = position and ":" .. line_at(source, closer or position) or ""
    M.stop(("%s%s: %s: %s"):format(page, line, label, message))
  end
end

-- ":12" for the first line of the page that holds the text, "" if there is none.
function M.line_of(text)
  local source = project.read(project.page) or ""
  local position = source:find(text, 1, true)
  return position and ":" .. line_at(source, position) or ""
end

-- A fenced div with a mistake in its attributes is a paragraph to Pandoc.
function M.check_fences(blocks)
  local function check(block)
    local first = block.content[1]
    if not first or first.t ~= "Str" or not first.text:match("^:::") then return end
    local text = pandoc.utils.stringify(block):match("^%S+%s*%S*")
    local message = "this line opens or closes no div: check the attributes and the quotes: " .. text
    M.stop(project.page .. M.line_of(text) .. ": " .. message)
  end
  blocks:walk { Para = check, Plain = check }
end

return M
