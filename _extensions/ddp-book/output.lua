-- Turns the outputs of a recorded cell into blocks.

local import = ...
local make_table = import "table"
local recording = import "recording"
local sorted_keys = import "sorted_keys"
local svg = import "svg"
local text_of, present, bundle = recording.text, recording.present, recording.bundle

local M = {}

local RANKS = "application/vnd.miniddp.ranks+json"
local VALUES = "application/vnd.miniddp.values+json"
local TEXT_ONLY = "markdown-raw_html-raw_attribute-native_divs-native_spans-fenced_divs-bracketed_spans-link_attributes"
  .. "-header_attributes-fenced_code_attributes-inline_code_attributes"
local WEB = { https = true, mailto = true, repo = true }
local RANK_COLOURS = 8
local LONGEST_OF_THREE = 36 -- characters of a line that still stands beside two others

local function text_block(text) return pandoc.CodeBlock((text:gsub("%s+$", "")), { class = "output" }) end

-- Three ranks stand side by side, or one below the other where a line is long; other numbers leave no hole.
local function ranks_class(longest, count)
  if count ~= 3 then return "ranks" end
  return longest > LONGEST_OF_THREE and "ranks of-1" or "ranks of-3"
end

local function ranks_block(content)
  local blocks, longest = pandoc.Blocks {}, 0
  for position, text in ipairs(content.ranks) do
    local rank = position - 1
    for line in text_of(text):gmatch("[^\n]+") do longest = math.max(longest, utf8.len(line) or #line) end
    local name = pandoc.Div({ pandoc.Plain("rank " .. rank) }, { class = "rank-name" })
    local classes = { "rank", "rank-" .. rank % RANK_COLOURS }
    blocks:insert(pandoc.Div({ name, text_block(text_of(text)) }, pandoc.Attr("", classes)))
  end
  local title = present(content.title)
  if title then blocks:insert(1, pandoc.Div({ pandoc.Plain(title) }, { class = "ranks-title" })) end
  return pandoc.Div(blocks, { class = ranks_class(longest, #content.ranks) })
end

-- A recorded figure as part of the page.
function M.figure(text, alt, fail)
  return pandoc.RawBlock("html", svg.element(text, "its figure", "aria-label", alt, fail))
end

-- Markdown that a run wrote: without HTML, without attributes, and with links that lead to the web or the book.
function M.markdown(text, fail)
  return pandoc.read(text, TEXT_ONLY).blocks:walk {
    Link = function(link)
      local scheme = link.target:match("^%s*(%a[%w+.-]*):")
      if scheme and not WEB[scheme:lower()] then fail("a text of it links to " .. link.target) end
    end,
    Image = function(image) fail("a text of it loads " .. image.src) end,
  }
end

local function values_table(values)
  local rows = {}
  for _, key in ipairs(sorted_keys(values)) do
    local value = values[key]
    local text = math.type(value) and ("%.15g"):format(value) or tostring(value)
    table.insert(rows, { pandoc.Inlines { pandoc.Code(key) }, text })
  end
  return make_table({ "Name", "Value" }, rows)
end

-- The blocks for the richest form of one output; nil for recorded values, which are not for show.
local function display(output, alt_of, fail)
  local ranks = bundle(output, RANKS)
  if ranks then return { ranks_block(ranks) } end
  local image = bundle(output, "image/svg+xml")
  if image then return { M.figure(image, alt_of(output), fail) } end
  local markdown = bundle(output, "text/markdown")
  if markdown then return M.markdown(markdown, fail) end
  if bundle(output, VALUES) then return nil end
  local text = bundle(output, "text/plain")
  return text and { text_block(text) } or fail("one of its outputs has no form that a page can show")
end

-- `alt_of(output)` gives the text that stands for a figure.
function M.blocks(cell, alt_of, fail)
  local blocks, streamed = pandoc.Blocks {}, ""
  local function flush()
    if streamed:match("%S") then blocks:insert(text_block(streamed)) end
    streamed = ""
  end
  for _, output in ipairs(cell.outputs or {}) do
    if output.output_type == "stream" then
      streamed = streamed .. text_of(output.text)
    else
      flush()
      blocks:extend(display(output, alt_of, fail) or {})
    end
  end
  flush()
  local values = recording.cell_values(cell)
  if #blocks == 0 and next(values) then blocks:insert(values_table(values)) end
  return blocks
end

return M
