# To be sourced. with_lists COMMAND: with the system's lists of packages or, if they lack some, with new lists in the
# working folder. COMMAND calls "${apt[@]}" and needs not be root.
apt=(apt-get -qq)
with_lists() {
  "$@" 2>/dev/null && return
  mkdir -p lists/partial archives/partial
  apt+=(-o "Dir::State::lists=$PWD/lists" -o "Dir::Cache=$PWD/archives")
  "${apt[@]}" update && "$@"
}
