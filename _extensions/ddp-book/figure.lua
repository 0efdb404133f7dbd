-- A figure with a caption; Quarto numbers one whose name starts with `fig-` (a table's: `tbl-`).

local function caption_of(div, fail)
  local blocks = div.content
  if #blocks == 0 then return nil end
  if #blocks > 1 or not blocks[1].content or blocks[1].t ~= "Para" and blocks[1].t ~= "Plain" then
    fail("the caption must be one paragraph")
  end
  return blocks[1].content
end

-- The content as it is if the div neither has a caption nor a name.
return function(content, div, fail)
  local caption, id = caption_of(div, fail), div.identifier
  local classes = div.classes:filter(function(class) return class == "diagram" or class == "interactive" end)
  local attributes = pandoc.Attr(id, classes)
  if not caption and id ~= "" then fail("a figure with a name needs a caption: write it inside") end
  if not caption then return content end
  if quarto and id ~= "" then
    content:insert(pandoc.Para(caption))
    return pandoc.Blocks { pandoc.Div(content, attributes) }
  end
  return pandoc.Blocks { pandoc.Figure(content, { long = { pandoc.Plain(caption) } }, attributes) }
end
