-- Draws a recorded timeline: what backward computes, and when each bucket was ready, sent and done.

local M = {}

M.MIME = "application/vnd.miniddp.timeline+json"

local WIDTH, LEFT, RIGHT = 440, 84, 432
local TOP, ROW = 34, 34
local RANK = "var(--rank-0, #2563eb)"

local function element(tag, attributes, content)
  local names, parts = {}, {}
  for name in pairs(attributes) do table.insert(names, name) end
  table.sort(names)
  for _, name in ipairs(names) do
    local value = attributes[name]
    local text = math.type(value) == "float" and ("%.1f"):format(value) or tostring(value)
    table.insert(parts, (' %s="%s"'):format(name, (text:gsub('[&"<]', { ["&"] = "&amp;", ['"'] = "&quot;", ["<"] = "&lt;" }))))
  end
  local opening = "<" .. tag .. table.concat(parts)
  return content and ("%s>%s</%s>"):format(opening, content, tag) or opening .. "/>"
end

local function text(x, y, content, anchor, colour)
  local attributes = { x = x, y = y, ["text-anchor"] = anchor, fill = colour }
  return element("text", attributes, content)
end

local function box(x, y, width, height, attributes)
  attributes.x, attributes.y, attributes.width, attributes.height = x, y, width, height
  return element("rect", attributes)
end

local function line(x1, y1, x2, y2, attributes)
  attributes.d = ("M%.1f %.1fL%.1f %.1f"):format(x1, y1, x2, y2)
  attributes.fill = "none"
  return element("path", attributes)
end

-- A round number of milliseconds between two marks of the axis, five marks at most.
local function tick_of(milliseconds)
  local power = 10 ^ math.floor(math.log(milliseconds / 5, 10))
  for _, factor in ipairs { 1, 2, 5 } do
    if milliseconds / (factor * power) <= 5 then return factor * power end
  end
  return 10 * power
end

local function axis(milliseconds, x_at, bottom)
  local parts, step = {}, tick_of(milliseconds)
  for number = 0, math.floor(milliseconds / step + 1e-9) do
    local x, label = x_at(number * step / 1000), ("%g"):format(number * step)
    table.insert(parts, line(x, TOP - 6, x, bottom, { stroke = "var(--line, #8b949e)", ["stroke-width"] = 0.5 }))
    table.insert(parts, text(x, bottom + 18, label, "middle", "var(--muted, #57606a)"))
  end
  table.insert(parts, text(LEFT - 12, bottom + 18, "ms", "end", "var(--muted, #57606a)"))
  return table.concat(parts)
end

local function in_ready_order(rank)
  local order = {}
  for position in ipairs(rank.ready) do order[position] = position end
  table.sort(order, function(a, b) return rank.ready[a] < rank.ready[b] end)
  return order
end

local function check(timeline, fail)
  local ranks, buckets = timeline.ranks or {}, timeline.buckets or {}
  if #ranks == 0 or #buckets == 0 then fail("the timeline has no ranks or no buckets") end
  for number, rank in ipairs(ranks) do
    for _, event in ipairs { "ready", "launched", "done" } do
      if #(rank[event] or {}) ~= #buckets then
        fail(("the timeline does not say when each bucket of rank %d was %s"):format(number - 1, event))
      end
    end
  end
end

-- The SVG of rank 0's pass; `label` says what is to be seen.
function M.draw(timeline, label, fail)
  check(timeline, fail)
  local rank = timeline.ranks[1]
  local order = in_ready_order(rank)
  local computed = rank.ready[order[#order]]
  local bottom = TOP + ROW * (#order + 1) + 4
  local function x_at(seconds) return LEFT + (RIGHT - LEFT) * seconds / rank["end"] end

  local parts = { axis(1000 * rank["end"], x_at, bottom) }
  local function add(part) table.insert(parts, part) end
  add(box(x_at(computed), TOP, x_at(rank["end"]) - x_at(computed), bottom - TOP, { fill = "var(--bad, #be123c)", ["fill-opacity"] = 0.1 }))
  add(text(LEFT - 12, TOP + 21, "backward", "end"))
  local from = 0
  for _, position in ipairs(order) do
    local till = rank.ready[position]
    add(box(x_at(from), TOP + 5, x_at(till) - x_at(from), ROW - 10, { fill = "var(--surface, #f6f8fa)", stroke = "var(--fg, #1b1f24)", ["stroke-width"] = 1.5 }))
    from = till
  end
  for position in ipairs(rank.ready) do
    local y = TOP + ROW * position
    local ready, launched, done = x_at(rank.ready[position]), x_at(rank.launched[position]), x_at(rank.done[position])
    add(text(LEFT - 12, y + 21, "bucket " .. position - 1, "end"))
    add(line(ready, TOP + ROW - 5, ready, y + ROW - 5, { stroke = "var(--fg, #1b1f24)", ["stroke-dasharray"] = "2 3" }))
    add(line(ready, y + ROW / 2, launched, y + ROW / 2, { stroke = "var(--fg, #1b1f24)", ["stroke-width"] = 1.5 }))
    add(box(launched, y + 5, math.max(2, done - launched), ROW - 10, { fill = RANK, stroke = RANK, ["fill-opacity"] = 0.25, ["stroke-width"] = 1.5, rx = 3 }))
  end
  add(text(x_at(0), 16, "backward computes", "start", "var(--muted, #57606a)"))
  add(text(RIGHT, 16, "waits", "end", "var(--muted, #57606a)"))
  return element("svg", {
    role = "img",
    ["aria-label"] = label,
    viewBox = ("0 0 %d %d"):format(WIDTH, bottom + 26),
    fill = "var(--fg, #1b1f24)",
    ["font-family"] = "system-ui, sans-serif",
    ["font-size"] = 14,
    width = "100%",
    style = "display: block; max-width: 33rem; height: auto; margin: 0 auto",
  }, table.concat(parts))
end

return M
