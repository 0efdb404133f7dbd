-- A table out of rows of text, inlines or blocks; the first column names its row, numbers stand on the right.

local stringify = pandoc.utils.stringify

local function cell_of(content)
  if pandoc.utils.type(content) == "Blocks" then return content end
  return { pandoc.Plain(content) }
end

local function cells_of(row)
  local cells = {}
  for _, content in ipairs(row) do table.insert(cells, cell_of(content)) end
  return cells
end

local function is_number(text) return text:gsub("−", "-"):match "^[+-]?%d[%d,]*%.?%d*$" or text:match "^%d+\u{a0}[KMG]?i?B$" end

local function holds_numbers(rows, column)
  for _, row in ipairs(rows) do
    local text = stringify(row[column])
    if text ~= "" and not is_number(text) then return false end
  end
  return column > 1
end

return function(header, rows, class)
  local aligns, widths, cells = {}, {}, {}
  for column in ipairs(rows[1]) do
    aligns[column], widths[column] = holds_numbers(rows, column) and "AlignRight" or "AlignDefault", 0
  end
  for _, row in ipairs(rows) do table.insert(cells, cells_of(row)) end
  local simple = pandoc.SimpleTable({}, aligns, widths, header and cells_of(header) or {}, cells)
  local made = pandoc.utils.from_simple_table(simple)
  made.classes = class and { class } or {}
  made.bodies[1].row_head_columns = 1
  return made
end
