-- A table out of rows of text or inlines; the first column names its row.

local function cells_of(texts)
  local cells = {}
  for _, text in ipairs(texts) do
    table.insert(cells, { pandoc.Plain(type(text) == "string" and pandoc.Inlines(text) or text) })
  end
  return cells
end

return function(header, rows, class)
  local aligns, widths, cells = {}, {}, {}
  for column in ipairs(rows[1]) do
    aligns[column], widths[column] = "AlignDefault", 0
  end
  for _, row in ipairs(rows) do table.insert(cells, cells_of(row)) end
  local simple = pandoc.SimpleTable({}, aligns, widths, header and cells_of(header) or {}, cells)
  local made = pandoc.utils.from_simple_table(simple)
  made.classes = class and { class } or {}
  made.bodies[1].row_head_columns = 1
  return made
end
