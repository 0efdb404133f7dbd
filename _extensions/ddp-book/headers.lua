-- A table's header cell without text is read aloud as nothing: it gets a name that is not seen.

local function is_empty(cell) return pandoc.utils.stringify(cell.contents):match("^%s*$") ~= nil end

local function name_cells(row)
  for column, cell in ipairs(row.cells) do
    if is_empty(cell) then
      local name = column == 1 and "Row" or "Column " .. column
      cell.contents = { pandoc.Plain { pandoc.Span(name, { class = "visually-hidden" }) } }
    end
  end
end

-- The blocks with a name in every header cell of their tables.
return function(blocks)
  return blocks:walk {
    Table = function(element)
      for _, row in ipairs(element.head.rows) do
        if row.cells:find_if(function(cell) return not is_empty(cell) end) then name_cells(row) end
      end
      return element
    end,
  }
end
