#!/bin/sh
# Fetches Vega, Vega-Lite and Vega's interpreter (which needs no eval) from npm:
#   update.sh VEGA VEGA_LITE INTERPRETER      such as   update.sh 6.4.0 6.4.3 2.3.2
# Then run the browser tests, and write versions and checksums into VENDORED.json.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for package in "vega@$1" "vega-lite@$2" "vega-interpreter@$3"; do
  tar -xzf "$(npm pack --silent "$package")"
  mv package "${package%@*}"
done
cp vega/build/vega.min.js vega/LICENSE "$here/"
mv "$here/LICENSE" "$here/LICENSE.txt"
cp vega-lite/build/vega-lite.min.js "$here/"
# The interpreter is published as a module only; here it takes its helpers from vega and adds itself.
{
  echo '(() => {'
  sed -e "s/^import \(.*\) from 'vega-util';/const \1 = vega;/" \
      -e 's/^export { expression as expressionInterpreter };/vega.expressionInterpreter = expression;/' \
      -e '/^\/\/# sourceMappingURL/d' vega-interpreter/build/vega-interpreter.js
  echo '})();'
} > "$here/vega-interpreter.js"
cd "$here" && sha256sum ./*.js
