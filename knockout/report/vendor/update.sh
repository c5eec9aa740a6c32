#!/bin/sh
# Fetches a version of plotly.js' basic bundle from npm: update.sh 4.1.1
# Then run the browser tests, and write version and checksum into VENDORED.json.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm pack --silent "plotly.js-basic-dist-min@$1" >/dev/null
tar -xzf plotly.js-basic-dist-min-*.tgz
cp package/plotly-basic.min.js "$here/plotly-basic.min.js"
cp package/LICENSE "$here/plotly-basic.LICENSE.txt"
sha256sum "$here/plotly-basic.min.js"
