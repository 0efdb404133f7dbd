-- `.val`: a recorded value inside a sentence, or one that others measured.

local import = ...
local measurement = import "measurement"
local provenance = import "provenance"
local recording = import "recording"
local sorted_keys = import "sorted_keys"

-- Commas between thousands: "-1234567.5" → "-1,234,567.5".
local function grouped(text)
  local count
  repeat
    text, count = text:gsub("^(%D*%d+)(%d%d%d)", "%1,%2")
  until count == 0
  return text
end

-- As string.format with one value; `%,d` and `%,.1f` put commas between thousands. Nil if the value
-- does not fit.
local function formatted(value, format)
  if not format then return math.type(value) and ("%.15g"):format(value) or tostring(value) end
  local plain, commas = format:gsub("%%,", "%%")
  local _, places = plain:gsub("%%%%", ""):gsub("%%", "")
  local fits, text = pcall(string.format, plain, value)
  if not fits or places ~= 1 then return nil end
  return commas > 0 and grouped(text) or text
end

-- The value, its unit, where it comes from, and the link to there if there is one.
local function recorded(given, fail)
  local known = {}
  for _, one in ipairs(recording.find(given.run, given.kind, fail)) do
    local values, cells = recording.values(one)
    for name in pairs(values) do known[name] = true end
    local value = values[given.key]
    if value ~= nil then return value, given.unit, one.name .. ": " .. provenance.line(one, cells[given.key]) end
  end
  fail(("no such value is recorded (there are: %s)"):format(table.concat(sorted_keys(known), ", ")))
end

local function measured(given, fail)
  local one = measurement.find(given, fail)[1]
  if #one.rows > 1 then fail(('%d rows where="%s": expected one'):format(#one.rows, given.where or "")) end
  local cell = one.rows[1][given.column or fail('expected column="name"')]
  if cell == "" then fail("the source gives no such value: the cell is empty") end
  local before, authors, after, link = measurement.origin(one)
  return given.format and tonumber(cell) or cell, given.unit or one.units[given.column], before .. authors .. after, link
end

return function(span, fail)
  local given = span.attributes
  local value, unit, tip, link = (given.table and measured or recorded)(given, fail)
  local text = formatted(value, given.format)
  if not text then fail(('format="%s" does not fit the value %s'):format(given.format, tostring(value))) end
  if unit then text = text .. "\u{a0}" .. unit end
  if link then return pandoc.Link(text, link, "", pandoc.Attr("", { "recorded" }, { ["data-tip"] = tip })) end
  return pandoc.Span({ pandoc.Str(text) }, pandoc.Attr("", { "recorded" }, { { "tabindex", "0" }, { "data-tip", tip } }))
end
