-- Reads recordings: executed notebooks recordings/NAME.gpu.ipynb and recordings/NAME.cpu.ipynb.

local import = ...
local project = import "project"

local M = {}

local KINDS = { "gpu", "cpu" } -- in the order in which a page shows them
local VALUES = "application/vnd.miniddp.values+json"

-- Jupyter keeps text as a string or as a list of lines.
function M.text(value) return type(value) == "table" and table.concat(value) or value end

-- A JSON value that may be null.
function M.present(value)
  if value ~= pandoc.json.null then return value end
end

-- The bundle of an output for a mime type: a table where the type is JSON, else text.
function M.bundle(output, mime)
  local data = output.data and output.data[mime]
  return mime:match("json$") and data or M.text(data)
end

local function file_of(name, kind) return ("recordings/%s.%s.ipynb"):format(name, kind) end

local loaded = {}

-- A recording: { name, kind, path, meta (the `miniddp` metadata), cells }, or nil if there is none.
local function load(name, kind, fail)
  local path = file_of(name, kind)
  local text = not loaded[path] and project.read(path)
  if not text then return loaded[path] end
  local _, notebook = pcall(pandoc.json.decode, text, false)
  if type(notebook) ~= "table" or type(notebook.cells) ~= "table" then fail(path .. " is not a notebook") end
  local meta = type(notebook.metadata) == "table" and notebook.metadata.miniddp
  if type(meta) ~= "table" then
    fail(path .. " is not a recording: its metadata has no `miniddp` (make one with: make record RUN=" .. name .. ")")
  end
  loaded[path] = { name = name, kind = kind, path = path, meta = meta, cells = notebook.cells }
  return loaded[path]
end

-- The names of the book's runs, recorded or not.
function M.runs()
  local names = {}
  for _, file in ipairs(project.list("runs", "^%d%d%-.*%.py$")) do table.insert(names, (file:gsub("%.py$", ""))) end
  return names
end

-- The recordings of a run, GPU first, without complaint if there is none.
function M.existing(name, fail)
  local found = pandoc.List {}
  for _, kind in ipairs(KINDS) do found:insert(load(name, kind, fail)) end
  return found
end

-- The recordings of a run, GPU first; only those of one kind if `kind` is given.
function M.find(name, kind, fail)
  if not name then fail("no run is named") end
  if kind and kind ~= "gpu" and kind ~= "cpu" then fail('kind must be "gpu" or "cpu"') end
  local found = M.existing(name, fail):filter(function(one) return not kind or one.kind == kind end)
  if #found > 0 then return found end
  if project.read("runs/" .. name .. ".py") then
    fail(("no recording %s (make it with: make record RUN=%s)"):format(file_of(name, kind or "cpu"), name))
  end
  fail(("no such run: there is no runs/%s.py (there are: %s)"):format(name, table.concat(M.runs(), ", ")))
end

-- The cell of a recording with that name, or nil; and the names that its cells have.
local function named_cell(recording, wanted, fail)
  local found, names = nil, {}
  for _, cell in ipairs(recording.cells) do
    local name = cell.metadata.name
    if name == wanted then
      if found then fail(("two cells of %s are named %s"):format(recording.path, name)) end
      found = cell
    end
    table.insert(names, name)
  end
  return found, names
end

-- The recordings that have the cell, as { kind, recording, cell }. A GPU recording may lag behind.
function M.with_cell(name, kind, cell_name, fail)
  if not cell_name then fail("no cell is named") end
  local found, cell, names = {}, nil, {}
  for _, one in ipairs(M.find(name, kind, fail)) do
    cell, names = named_cell(one, cell_name, fail)
    if cell then table.insert(found, { kind = one.kind, recording = one, cell = cell }) end
  end
  if #found > 0 then return found end
  fail(("no such cell in the recording (it has: %s)"):format(table.concat(names, ", ")))
end

-- Everything that one cell recorded by name: key → number or string.
function M.cell_values(cell)
  local values = {}
  for _, output in ipairs(cell.outputs or {}) do
    for key, value in pairs(M.bundle(output, VALUES) or {}) do values[key] = value end
  end
  return values
end

-- The same for all cells, and key → name of the cell.
function M.values(recording)
  if recording.values then return recording.values, recording.cell_of end
  recording.values, recording.cell_of = {}, {}
  for _, cell in ipairs(recording.cells) do
    for key, value in pairs(M.cell_values(cell)) do
      recording.values[key], recording.cell_of[key] = value, cell.metadata.name
    end
  end
  return recording.values, recording.cell_of
end

return M
