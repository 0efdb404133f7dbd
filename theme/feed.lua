-- Writes feed.xml: what changed, as an Atom feed with an entry for each version of CHANGELOG.md. Quarto runs it
-- after rendering (`project: post-render`), the plain build after its pages.

local function read(path)
  local file <close> = assert(io.open(path, "rb"))
  return file:read("a")
end

local function setting(name) return read("_quarto.yml"):match("\n%s*" .. name .. ":%s*[\"']?([^\n\"']+)") end

local function escaped(text) return (text:gsub("&", "&amp;"):gsub("<", "&lt;"):gsub(">", "&gt;")) end

local home = setting("site%-url"):gsub("/*$", "/")
local newest = "" -- the day of the newest recording: what is not released yet has no other
for _, name in ipairs(pandoc.system.list_directory "recordings") do
  local day = read("recordings/" .. name):match '"date": "(%d+%-%d+%-%d+)"'
  if day and day > newest then newest = day end
end

local ENTRY = '<entry><id>%sfeed.xml#%s</id><title>%s</title><updated>%sT00:00:00Z</updated><link href="%s"/>'
  .. '<content type="html">%s</content></entry>\n'
local FEED = '<?xml version="1.0" encoding="utf-8"?>\n<feed xmlns="http://www.w3.org/2005/Atom"><id>%sfeed.xml</id>'
  .. '<title>%s</title><updated>%sT00:00:00Z</updated><link href="%s"/><link rel="self" href="%sfeed.xml"/>'
  .. "<author><name>Its contributors</name></author>\n%s</feed>\n"

local changes = pandoc.utils.make_sections(false, nil, pandoc.read(read "CHANGELOG.md", "markdown").blocks)
local entries = {}
for _, section in ipairs(changes[1].content) do
  local header = section.t == "Div" and section.content:remove(1)
  if header then
    local title = pandoc.utils.stringify(header)
    local content = pandoc.write(pandoc.Pandoc(section.content), "html")
    local name = title:gsub("%W+", "-")
    local day = title:match "%d+%-%d+%-%d+" or newest
    table.insert(entries, ENTRY:format(home, name, escaped(title), day, home, escaped(content)))
  end
end

local file <close> = assert(io.open(pandoc.path.join { os.getenv "QUARTO_PROJECT_OUTPUT_DIR", "feed.xml" }, "wb"))
file:write(FEED:format(home, escaped(setting "title"), newest, home, home, table.concat(entries)))
