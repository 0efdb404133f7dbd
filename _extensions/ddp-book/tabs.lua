-- One recording's blocks as they are, those of several as tabs. What `badge_of` gives, if anything, comes
-- below: at the end of each tab, or as the second result.

return function(recordings, blocks_of, badge_of)
  local function below(recording) return pandoc.Blocks(badge_of and { badge_of(recording) } or {}) end
  if #recordings == 1 then return blocks_of(recordings[1]), below(recordings[1]) end
  local tabs = pandoc.Blocks {}
  for _, recording in ipairs(recordings) do
    tabs:insert(pandoc.Header(2, recording.kind:upper()))
    tabs:extend(blocks_of(recording) .. below(recording))
  end
  return pandoc.Blocks { pandoc.Div(tabs, { class = "panel-tabset" }) }, pandoc.Blocks {}
end
