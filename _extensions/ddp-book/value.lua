-- `.val`: a recorded value inside a sentence.

local import = ...
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

return function(span, fail)
  local attributes = span.attributes
  local key, unit = attributes.key, attributes.unit
  local known = {}
  for _, one in ipairs(recording.find(attributes.run, attributes.kind, fail)) do
    local value = recording.values(one)[key]
    for name in pairs(recording.values(one)) do known[name] = true end
    if value ~= nil then
      local text = formatted(value, attributes.format)
      if not text then fail(('format="%s" does not fit the value %s'):format(attributes.format, tostring(value))) end
      if unit then text = text .. "\u{a0}" .. unit end
      local tip = one.name .. ": " .. provenance.line(one)
      local attr = pandoc.Attr("", { "recorded" }, { { "tabindex", "0" }, { "data-tip", tip } })
      return pandoc.Span({ pandoc.Str(text) }, attr)
    end
  end
  fail(("no such value is recorded (there are: %s)"):format(table.concat(sorted_keys(known), ", ")))
end
