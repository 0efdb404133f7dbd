-- Keeps what touches a formula on its line: browsers break between a formula and a full stop.
-- And names of options and of environment variables, which they break behind a hyphen.

local OPENING, CLOSING = "[%(%[]+$", "^[^%w]+"
local OPTION, VARIABLE, LONGEST = "^%-%-[%w_-]+$", "^[%u%d_]+$", 34

-- Takes the part of the string `inline` that matches off; what is left may be empty.
local function take(inline, pattern)
  if not inline or inline.t ~= "Str" then return nil end
  local part = inline.text:match(pattern)
  if part then inline.text = inline.text:gsub(pattern, "") end
  return part and pandoc.Str(part)
end

local function keep_together(inlines)
  local done = pandoc.Inlines {}
  for position, inline in ipairs(inlines) do
    local is_formula = inline.t == "Math" and inline.mathtype == "InlineMath"
    local before = is_formula and take(done[#done], OPENING)
    local after = is_formula and take(inlines[position + 1], CLOSING)
    if before or after then
      inline = pandoc.Span(pandoc.Inlines { before or "", inline, after or "" }, { class = "nobreak" })
    end
    done:insert(inline)
  end
  return done
end

local function keep_name(code)
  local is_name = code.text:match(OPTION) or code.text:match(VARIABLE)
  if is_name and #code.text <= LONGEST then code.classes:insert("nobreak") end
  return code
end

return function(blocks) return blocks:walk { Inlines = keep_together, Code = keep_name } end
