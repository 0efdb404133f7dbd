-- Prints a figure as compact.lua makes it: pandoc lua compact.lua EXTENSION FIGURE
local extension, path = arg[1], arg[2]
local compact = assert(loadfile(extension .. "/compact.lua"))()
local text = assert(io.open(path, "rb")):read("a")
local root, body = text:match("^(<svg[^>]*>)(.*)</svg>")
io.write(root, compact.figure(body, "small-"), "</svg>")
