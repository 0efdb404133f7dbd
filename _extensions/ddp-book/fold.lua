-- Blocks that are folded away under a summary.

return function(blocks, summary, class)
  local inlines = pandoc.utils.blocks_to_inlines(pandoc.read(summary, "markdown").blocks)
  local text = pandoc.write(pandoc.Pandoc { pandoc.Plain(inlines) }, "html")
  blocks:insert(1, pandoc.RawBlock("html", ('<details class="%s"><summary>%s</summary>'):format(class, text)))
  blocks:insert(pandoc.RawBlock("html", "</details>"))
  return blocks
end
