# zsh -f complete_lines.zsh SCRIPT FOLDER LINE...
# Types each line and a tab into an interactive zsh that has sourced the script, and prints what it offered, a word a
# line, then `[the line after the tab]`. FOLDER is for temporary files.
if [[ -n $COMPLETED_WORDS ]]; then # sourced by the interactive shell
  PROMPT=
  unsetopt beep
  autoload -Uz compinit && compinit -u -D
  source $COMPLETION_SCRIPT
  compadd() { # records the matches of each call that adds some
    if [[ ${argv[1,(i)(-|--)]} != (|* )-[OAD]* ]]; then
      local -a matches
      builtin compadd -A matches "$@"
      (( $#matches )) && print -rl -- $matches >> $COMPLETED_WORDS
    fi
    builtin compadd "$@"
  }
  _complete_without_list() { _main_complete; compstate[list]=; }
  zle -C complete-without-list complete-word _complete_without_list
  complete-and-record() { zle complete-without-list; print -r -- "[$BUFFER]" >> $COMPLETED_WORDS; }
  zle -N complete-and-record
  bindkey '^I' complete-and-record
  bindkey '^U' kill-whole-line
  print -r -- '[ready]' >> $COMPLETED_WORDS
  return
fi

zmodload zsh/zpty || exit 1
export COMPLETION_SCRIPT=$1 COMPLETED_WORDS=$2/words
: > $COMPLETED_WORDS

wait_for_brackets() { # until the file has so many lines `[...]`; reads what the shell prints, so that it is not blocked
  local deadline=$((SECONDS + 60)) output
  while (( $(grep -c '^\[.*\]$' $COMPLETED_WORDS) < $1 )); do
    zpty -r -t shell output
    (( SECONDS < deadline )) || { print -u2 -r -- "no completion of line $1 within 60 s: $output"; exit 1; }
    sleep 0.02
  done
}

zpty shell zsh -f -i
zpty -w shell "source ${(q)0:A}"
wait_for_brackets 1
number=1
for line in ${argv[3,-1]}; do
  zpty -n -w shell $'\x15'$line$'\t'
  wait_for_brackets $((++number))
done
zpty -d shell
grep -v -x '\[ready\]' $COMPLETED_WORDS
