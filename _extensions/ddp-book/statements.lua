-- Splits Python source into logical lines: what a reader of code calls one statement.

local M = {}

function M.split_lines(text)
  local lines = {}
  for line in (text:gsub("\n$", "") .. "\n"):gmatch("(.-)\n") do table.insert(lines, line) end
  return lines
end

-- The position after the string that starts at `from`; `newline()` hears of its line breaks.
local function skip_string(text, from, newline)
  local quote = text:sub(from, from)
  local close = text:sub(from, from + 2) == quote:rep(3) and quote:rep(3) or quote
  local at = from + #close
  while true do
    local stop, _, mark = text:find("([\\\n" .. quote .. "])", at)
    if not stop then return #text + 1 end
    if mark == "\\" then
      if text:sub(stop + 1, stop + 1) == "\n" then newline() end
      at = stop + 2
    elseif mark == "\n" then
      if #close == 1 then return stop end -- not closed: not Python, but no reason to lose the rest
      newline()
      at = stop + 1
    elseif text:sub(stop, stop + #close - 1) == close then
      return stop + #close
    else
      at = stop + 1
    end
  end
end

-- The set of line numbers that start inside a string, a bracket, or after a backslash.
local function continued_lines(text)
  local continued, line, depth, at = {}, 1, 0, 1
  local function newline(inside)
    line = line + 1
    continued[line] = inside
  end
  while true do
    local from, _, mark = text:find("([\"'#\\\n%(%)%[%]{}])", at)
    if not from then return continued end
    at = from + 1
    if mark == "\n" then
      newline(depth > 0)
    elseif mark == "#" then
      at = text:find("\n", at, true) or #text + 1
    elseif mark == "\\" then
      if text:sub(at, at) == "\n" then
        newline(true)
        at = at + 1
      end
    elseif mark == '"' or mark == "'" then
      at = skip_string(text, from, function() newline(true) end)
    else
      depth = math.max(0, depth + (mark:find("[%(%[{]") and 1 or -1))
    end
  end
end

-- Logical lines: { first, last (line numbers), indent, text (of the first line) }.
function M.statements(text, lines)
  local continued, found = continued_lines(text), {}
  for number, line in ipairs(lines) do
    local indent, code = line:match("^(%s*)(.*)$")
    if continued[number] and #found > 0 then
      found[#found].last = number
    elseif code ~= "" and code:sub(1, 1) ~= "#" then
      table.insert(found, { first = number, last = number, indent = #indent, text = code })
    end
  end
  return found
end

return M
