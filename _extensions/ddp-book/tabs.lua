-- One recording's blocks as they are, those of several as tabs.

return function(recordings, blocks_of)
  if #recordings == 1 then return blocks_of(recordings[1]) end
  local tabs = pandoc.Blocks {}
  for _, recording in ipairs(recordings) do
    tabs:insert(pandoc.Header(2, recording.kind:upper()))
    tabs:extend(blocks_of(recording))
  end
  return pandoc.Blocks { pandoc.Div(tabs, { class = "panel-tabset" }) }
end
