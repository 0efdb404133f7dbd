-- A line chart as SVG: x on a logarithmic axis, y from zero. Ours, because only runs are drawn when they
-- are recorded, by matplotlib: what others published has no run, and `quarto render` no Python to draw with.

local import = ...
local svg = import "svg"

local WIDTH, LEFT, RIGHT, HEIGHT, ROW = 440, 60, 16, 200, 20
local DASHES = { "", "7 3", "2 3", "10 3 2 3" }
local TEXT = '<text x="%.1f" y="%.1f" text-anchor="%s" fill="var(--muted, #57606a)">%s</text>'
local RULE = '<path d="M%.1f %.1f%s%.1f" stroke="var(--line, #8b949e)" %s/>'
local LINE = '<path d="M%s" fill="none" stroke="%s" stroke-width="2" stroke-dasharray="%s"/>'
local DOT = '<circle cx="%.1f" cy="%.1f" r="2.5" fill="%s"/>'

-- 1, 2 or 5 times a power of ten: the largest that fits four times at least.
local function step_to(top)
  local power = 10 ^ math.floor(math.log(top / 4, 10))
  return power * (top / 4 >= 5 * power and 5 or top / 4 >= 2 * power and 2 or 1)
end

-- `lines`: list of { label, points = list of { x, y } }; `show(x)`: the text of a tick; `mark`: an x to
-- mark. Nil if there are no two x above zero.
return function(lines, x_axis, y_axis, show, mark)
  local ticks, seen, top = {}, {}, 0
  for _, line in ipairs(lines) do
    for _, point in ipairs(line.points) do
      if not seen[point[1]] then table.insert(ticks, point[1]) end
      seen[point[1]], top = true, math.max(top, point[2])
    end
  end
  table.sort(ticks)
  if #ticks < 2 or ticks[1] <= 0 then return nil end
  local step = step_to(top)
  top = step * math.ceil(top / step)
  local above = ROW * ((lines[1].label == "" and 0 or #lines) + 2.5)
  local bottom = above + HEIGHT
  local per_x = (WIDTH - LEFT - RIGHT) / math.log(ticks[#ticks] / ticks[1])
  local function x_at(x) return LEFT + per_x * math.log(x / ticks[1]) end
  local function y_at(y) return bottom - HEIGHT * y / top end
  local parts = {}
  local function add(format, ...) table.insert(parts, format:format(...)) end

  add('<svg viewBox="0 0 %d %d" font-size="14">', WIDTH, bottom + 2.2 * ROW)
  for y = 0, top, step do
    add(RULE, LEFT, y_at(y), "H", WIDTH - RIGHT, 'stroke-width="0.5"')
    add(TEXT, LEFT - 6, y_at(y) + 5, "end", (("%.15g"):format(y):gsub("^(%d+)(%d%d%d)$", "%1,%2")))
  end
  for i = 1, #ticks, math.ceil(#ticks / 6) do add(TEXT, x_at(ticks[i]), bottom + ROW, "middle", show(ticks[i])) end
  if mark then
    add(RULE, x_at(mark), above - 8, "V", bottom, 'stroke-dasharray="3 4" stroke-width="1.5"')
    add(TEXT, x_at(mark), above - 14, "middle", show(mark))
  end
  for i, line in ipairs(lines) do
    local path, colour = {}, ("var(--rank-%d, #2563eb)"):format((i - 1) % 8)
    for _, point in ipairs(line.points) do
      table.insert(path, ("%.1f %.1f"):format(x_at(point[1]), y_at(point[2])))
      add(DOT, x_at(point[1]), y_at(point[2]), colour)
    end
    add(LINE, table.concat(path, "L"), colour, DASHES[(i - 1) % #DASHES + 1])
    if line.label ~= "" then
      add(LINE, ("%d %dh34"):format(LEFT, ROW * i - 8), colour, DASHES[(i - 1) % #DASHES + 1])
      add(TEXT, LEFT + 42, ROW * i - 3, "start", svg.escape(line.label))
    end
  end
  add(TEXT, 0, above - 14, "start", svg.escape(y_axis))
  add(TEXT, WIDTH - RIGHT, bottom + 2 * ROW, "end", svg.escape(x_axis))
  return table.concat(parts, "\n") .. "</svg>"
end
