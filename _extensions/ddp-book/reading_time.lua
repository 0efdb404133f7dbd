-- The reading time under a chapter's title.

local import = ...
local project = import "project"

local M = {}

local WORDS_PER_MINUTE, LINES_PER_MINUTE = 200, 20
local RATES = ("%d words or %d lines of code a minute"):format(WORDS_PER_MINUTE, LINES_PER_MINUTE)

-- Quarto hides the texts of the navigation in the page until it is rendered.
local function is_shown(block) return not (block.classes and block.classes:includes "hidden") end

-- The words of the prose, in the page as it is written.
function M.words(blocks)
  local words = 0
  blocks:filter(is_shown):walk {
    Str = function(str)
      if str.text:match("[%w\128-\255]") then words = words + 1 end
    end,
  }
  return words
end

-- The lines of the listings, in the page as it is shown: no outputs, and nothing that is folded away.
local function code_lines(blocks)
  local lines, folded = 0, 0
  blocks:filter(is_shown):walk {
    traverse = "topdown",
    CodeBlock = function(code)
      if folded == 0 and not code.classes:includes "output" then
        lines = lines + select(2, code.text:gsub("[^\n]+", ""))
      end
    end,
    RawBlock = function(raw)
      if raw.text:match("^<details") then folded = folded + 1 end
      if raw.text:match("^</details") then folded = folded - 1 end
      if folded == 0 then lines = lines + select(2, raw.text:gsub(' id="%l+%-%d+%-%d+"[^>]*>.[^/]', "")) end
    end,
  }
  return lines
end

local function count(number, what)
  return ("%d %s%s"):format(number, what, number == 1 and "" or "s"):gsub("^(%d+)(%d%d%d)", "%1,%2")
end

-- Puts it below the title of a chapter. Quarto has taken the title out of the text; elsewhere it is the
-- first heading.
function M.insert(blocks, words)
  if not project.page:match("^chapters/%d") then return blocks end
  local lines = code_lines(blocks)
  local minutes = math.max(1, math.ceil(words / WORDS_PER_MINUTE + lines / LINES_PER_MINUTE))
  local read = ("%d min read: "):format(minutes) .. count(words, "word")
  if lines > 0 then read = read .. ", " .. count(lines, "line") .. " of code" end
  local span = pandoc.Span(read, pandoc.Attr("", {}, { { "tabindex", "0" }, { "data-tip", RATES } }))
  local first = blocks[1]
  local position = first and first.t == "Header" and first.level == 1 and 2 or 1
  blocks:insert(position, pandoc.Div({ pandoc.Plain { span } }, { class = "reading-time" }))
  return blocks
end

return M
