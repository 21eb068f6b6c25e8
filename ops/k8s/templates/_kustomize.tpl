{{- /*
What kustomize does with the files of this folder, as far as they need it. So they are written once.
Objects are kept by "Kind/name", and changed in place.
*/ -}}

{{- /* Builds a folder: its `kustomization.yaml` into `.objects`. */ -}}
{{- define "cachesvc.build" -}}
{{- $root := . -}}
{{- $kustomization := .files.Get (printf "%s/kustomization.yaml" .folder) | fromYaml -}}
{{- range $kustomization.resources -}}
  {{- $path := printf "%s/%s" $root.folder . -}}
  {{- if hasSuffix ".yaml" $path -}}
    {{- range regexSplit "(?m)^---$" ($root.files.Get $path) -1 -}}
      {{- $object := fromYaml . -}}
      {{- $_ := set $root.objects (printf "%s/%s" $object.kind $object.metadata.name) $object -}}
    {{- end -}}
  {{- else -}}
    {{- include "cachesvc.build" (dict "files" $root.files "objects" $root.objects "folder" $path) -}}
  {{- end -}}
{{- end -}}
{{- range $kustomization.configMapGenerator -}}
  {{- $key := printf "ConfigMap/%s" .name -}}
  {{- if not (hasKey $root.objects $key) -}}
    {{- $labels := ($kustomization.generatorOptions | default dict).labels | default dict -}}
    {{- $metadata := dict "name" .name "labels" (deepCopy $labels) -}}
    {{- $_ := set $root.objects $key (dict "apiVersion" "v1" "kind" "ConfigMap" "metadata" $metadata "data" dict) -}}
  {{- end -}}
  {{- $data := (get $root.objects $key).data -}}
  {{- range .literals -}}
    {{- $pair := splitn "=" 2 . -}}
    {{- $_ := set $data $pair._0 $pair._1 -}}
  {{- end -}}
  {{- range .files -}}
    {{- $_ := set $data . ($root.files.Get (printf "%s/%s" $root.folder .)) -}}
  {{- end -}}
{{- end -}}
{{- range $kustomization.patches -}}
  {{- include "cachesvc.patch" (dict "objects" $root.objects "patch" (fromYaml .patch)) -}}
{{- end -}}
{{- range $label := $kustomization.labels -}}  {{- /* only the base has any, and it is built first */ -}}
  {{- range $object := $root.objects -}}
    {{- include "cachesvc.merge" (dict "into" $object.metadata "patch" (dict "labels" (deepCopy $label.pairs))) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- /* Lays `.patch` over the object of its kind and name. */ -}}
{{- define "cachesvc.patch" -}}
{{- $key := printf "%s/%s" .patch.kind .patch.metadata.name -}}
{{- $object := get .objects $key | required (printf "patches: there is no %s" $key) -}}
{{- include "cachesvc.merge" (dict "into" $object "patch" .patch) -}}
{{- end -}}

{{- /* Lays `.patch` over `.into`. A null removes. Items of these lists are the same if this field is. */ -}}
{{- define "cachesvc.merge" -}}
{{- $into := .into -}}
{{- $by := dict "containers" "name" "initContainers" "name" "env" "name" "volumes" "name" "volumeMounts" "mountPath" -}}
{{- range $name, $value := .patch -}}
  {{- $held := get $into $name -}}
  {{- if kindIs "invalid" $value -}}
    {{- $_ := unset $into $name -}}
  {{- else if and (kindIs "map" $value) (kindIs "map" $held) -}}
    {{- include "cachesvc.merge" (dict "into" $held "patch" $value) -}}
  {{- else if and (hasKey $by $name) (kindIs "slice" $held) -}}
    {{- $field := get $by $name -}}
    {{- $new := list -}}
    {{- range $item := $value -}}
      {{- $is_new := true -}}
      {{- range $held -}}
        {{- if eq (get . $field) (get $item $field) -}}
          {{- include "cachesvc.merge" (dict "into" . "patch" $item) -}}
          {{- $is_new = false -}}
        {{- end -}}
      {{- end -}}
      {{- if $is_new -}}{{- $new = append $new $item -}}{{- end -}}
    {{- end -}}
    {{- $_ := set $into $name (concat $new $held) -}}
  {{- else -}}
    {{- $_ := set $into $name $value -}}
  {{- end -}}
{{- end -}}
{{- end -}}
