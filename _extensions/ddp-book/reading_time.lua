-- The reading time under a chapter's title.

local import = ...
local project = import "project"

local M = {}

local WORDS_PER_MINUTE = 200

-- Quarto hides the texts of the navigation in the page until it is rendered.
local function is_shown(block) return not (block.classes and block.classes:includes "hidden") end

-- Minutes, for the words of the prose: code is not counted. Nil for a page that is not a chapter.
function M.of(doc)
  if not project.page:match("^chapters/%d") then return nil end
  local words = 0
  doc.blocks:filter(is_shown):walk {
    Str = function(str)
      if str.text:match("[%w\128-\255]") then words = words + 1 end
    end,
  }
  return math.max(1, math.ceil(words / WORDS_PER_MINUTE))
end

-- Quarto has taken the title out of the text; elsewhere it is the first heading.
function M.insert(blocks, minutes)
  if not minutes then return blocks end
  local first = blocks[1]
  local position = first and first.t == "Header" and first.level == 1 and 2 or 1
  blocks:insert(position, pandoc.Div({ pandoc.Plain(minutes .. " min read") }, { class = "reading-time" }))
  return blocks
end

return M
