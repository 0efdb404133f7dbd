-- `.takeaways`, `.objectives`, `.exercise` and its `.answer`, `.predict` and its `.reveal`.

local import = ...
local fold = import "fold"
local project = import "project"

local M = {}

local exercises = 0

local function titled(div, title)
  div.content:insert(1, pandoc.Div({ pandoc.Plain(title) }, { class = "box-title" }))
  return div
end

function M.takeaways(div) return titled(div, "Takeaways") end

-- A box that starts with a list gets the words that introduce it.
function M.objectives(div)
  local first = div.content[1]
  if first and first.content and first.t:match("List$") then return titled(div, "You will be able to") end
  return div
end

function M.exercise(div)
  exercises = exercises + 1
  local chapter = tonumber(project.page:match("^chapters/(%d%d)%-"))
  local number = chapter and ("%d.%d"):format(chapter, exercises) or tostring(exercises)
  if div.identifier == "" then div.identifier = "exercise-" .. exercises end
  return titled(div, "Exercise\u{a0}" .. number)
end

function M.answer(div) return fold(div.content, "Answer", "answer") end

function M.predict(div) return titled(div, "What do you expect?") end

function M.reveal(div) return fold(div.content, "See what happens", "answer") end

return M
