-- `.notebook`: a whole executed run. `.recordings`: every run with its provenance.

local import = ...
local make_table = import "table"
local output = import "output"
local project = import "project"
local provenance = import "provenance"
local recording = import "recording"
local tabs = import "tabs"

local M = {}

local ANYWHERE = "anywhere" -- the first cell, of tools/anywhere.py: nothing that the run does

-- One level below the page's title, and with names that two tabs do not share.
local function fit_headings(blocks, kind)
  return blocks:walk {
    Header = function(header)
      header.level = header.level + 1
      header.identifier = kind .. "-" .. header.identifier
      header.classes:insert("unnumbered")
      return header
    end,
  }
end

local function markdown_cell(source, kind, fail)
  return pandoc.Div(fit_headings(output.markdown(source, fail), kind), { class = "nb-markdown" })
end

local function code_cell(cell, source, one, fail)
  local function alt_of(shown) return recording.bundle(shown, "text/plain") or "Figure of run " .. one.name end
  local blocks = pandoc.Blocks { pandoc.Div({ pandoc.CodeBlock(source, { class = "python" }) }, { class = "nb-in" }) }
  local shown = output.blocks(cell, alt_of, fail)
  if #shown > 0 then blocks:insert(pandoc.Div(shown, { class = "nb-out" })) end
  return pandoc.Div(blocks, { class = "nb-cell" })
end

-- A link that downloads the notebook, for Jupyter, and those that open it elsewhere.
local function links(one)
  local file = one.path:match("[^/]+$")
  local inlines = pandoc.Inlines { pandoc.Link("Download " .. file, project.link(one.path), "", { download = file }) }
  for _, place in ipairs { "Colab", "Kaggle" } do
    local address = project.open_in(place, one.path)
    if address then inlines:extend { pandoc.Space(), pandoc.Link("Open in " .. place, address) } end
  end
  return pandoc.Div({ pandoc.Plain(inlines) }, { class = "download" })
end

function M.notebook(div, fail)
  local found = recording.find(div.attributes.name, div.attributes.kind, fail)
  div.content = tabs(found, function(one)
    local blocks = pandoc.Blocks { make_table(nil, provenance.facts(one), "facts"), links(one) }
    for _, cell in ipairs(one.cells) do
      local source = recording.text(cell.source)
      if cell.cell_type == "markdown" then
        blocks:insert(markdown_cell(source, one.kind, fail))
      elseif cell.cell_type == "code" and source:match("%S") and cell.metadata.name ~= ANYWHERE then
        blocks:insert(code_cell(cell, source, one, fail))
      end
    end
    return blocks
  end)
  div.attributes = {}
  return div
end

local HEADER = { "Run", "Recording", "Ranks", "torch", "Date", "Commit" }

local function row_of(run, one)
  local meta = one.meta
  return {
    run,
    ("%s, %s%s"):format(one.kind:upper(), provenance.device(meta), provenance.is_stale(one) and ", older than the code" or ""),
    provenance.ranks_of(one),
    provenance.torch(meta) or "",
    meta.date,
    provenance.commit(meta),
  }
end

function M.recordings(div, fail)
  local rows = pandoc.List {}
  for _, name in ipairs(recording.runs()) do
    local page = "runs/" .. name .. ".qmd"
    local run = project.read(page) and pandoc.Inlines { pandoc.Link(name, project.link(page)) } or name
    local found = recording.existing(name, fail)
    rows:extend(found:map(function(one) return row_of(run, one) end))
    if #found == 0 then rows:insert { run, "not recorded", "", "", "", "" } end
  end
  if #rows == 0 then fail("there are no runs: no file runs/NN-name.py") end
  div.content = { make_table(HEADER, rows) }
  return div
end

return M
