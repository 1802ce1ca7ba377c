{{- define "kvx.name" -}}
{{- printf "%s" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvx.selector" -}}
app.kubernetes.io/name: vllm-kvx
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvx.labels" -}}
{{ include "kvx.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "kvx.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "kvx.claim" -}}
{{ .Values.cache.existingClaim | default (printf "%s-cache" (include "kvx.name" .)) }}
{{- end -}}

{{- define "kvx.gpus" -}}
{{- if kindIs "invalid" .Values.gpu.count -}}
{{ mul .Values.tensorParallelSize .Values.dataParallelSize }}
{{- else -}}
{{ int .Values.gpu.count }}
{{- end -}}
{{- end -}}

{{- /* JSON: arguments of `vllm-kvx calibrate` for each layer that the policies leave to a measurement. */ -}}
{{- define "kvx.unmeasured" -}}
{{- $found := list -}}
{{- $flags := dict "fastkv" (dict "window" "--window" "kernel" "--kernel" "tsp_rate" "--tsp-rate" "tsp_reduction" "--reduction") "structkv" (dict "window" "--window" "struct_rate" "--struct-rate" "decay" "--decay" "struct_reduction" "--reduction") -}}
{{- $layers := dict "fastkv" "tsp_layer" "structkv" "pivot" -}}
{{- $words := dict "fastkv" "auto" "structkv" "calibrated" -}}
{{- range $part := splitList "+" (prepend .Values.layout .Values.policy | join "+") -}}
{{- $name := splitList ":" $part | first -}}
{{- if hasKey $layers $name -}}
{{- $arguments := list "--method" $name -}}
{{- $known := hasKey ($.Values.additionalConfig.kv_measured | default dict) (get $layers $name) -}}
{{- range $parameter := splitList "," (trimPrefix $name $part | trimPrefix ":") -}}
{{- $pair := splitList "=" $parameter -}}
{{- if and (eq (first $pair) (get $layers $name)) (ne (last $pair) (get $words $name)) -}}{{- $known = true -}}{{- end -}}
{{- if and (has (first $pair) (list "tsp_rate" "struct_rate")) (eq (float64 (last $pair)) 1.0) -}}{{- $known = true -}}{{- end -}}
{{- with get (get $flags $name) (first $pair) -}}{{- $arguments = concat $arguments (list . (last $pair)) -}}{{- end -}}
{{- end -}}
{{- if not $known -}}{{- $found = append $found (join " " $arguments) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- uniq $found | toJson -}}
{{- end -}}

{{- /* --kv-cache-dtype of the servers; empty without one. */ -}}
{{- define "kvx.cacheDtype" -}}
{{- $dtype := "" -}}
{{- range $i, $arg := .Values.extraArgs -}}
{{- $parts := splitn "=" 2 $arg -}}
{{- if eq ($parts._0 | replace "_" "-") "--kv-cache-dtype" -}}
{{- $dtype = $parts._1 | default (index (append $.Values.extraArgs "") (add1 $i | int)) -}}
{{- end -}}
{{- end -}}
{{- print $dtype -}}
{{- end -}}

{{- /* What `vllm-kvx evaluate` takes behind a policy for the servers' KV cache, such as @fp8: nothing
       if it is not quantized, or if the job's engines have a quantized one already. */ -}}
{{- define "kvx.atDtype" -}}
{{- $plain := list "" "auto" "bfloat16" "float16" -}}
{{- $dtype := include "kvx.cacheDtype" . -}}
{{- $jobs := get .Values.prepare.engineArgs "kv_cache_dtype" -}}
{{- if and (not (has $dtype $plain)) (has $jobs $plain) -}}
{{- print "@" $dtype -}}
{{- end -}}
{{- end -}}

{{- /* JSON: what the job does, for `calibrate` and `evaluate`. */ -}}
{{- define "kvx.work" -}}
{{- $calibrate := list -}}
{{- if not (kindIs "invalid" .Values.prepare.calibrate) -}}
{{- range .Values.prepare.calibrate }}{{- $calibrate = append $calibrate (printf "--method %s" .) -}}{{- end -}}
{{- else if not .Values.calibrationLimit -}}
{{- $calibrate = include "kvx.unmeasured" . | fromJsonArray -}}
{{- end -}}
{{- $evaluate := .Values.prepare.evaluate -}}
{{- if kindIs "invalid" $evaluate -}}
{{- $at := include "kvx.atDtype" . -}}
{{- $evaluate = list -}}
{{- range prepend .Values.layout .Values.policy | uniq -}}
{{- if or $at (ne . "full") -}}{{- $evaluate = append $evaluate (print . $at) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- dict "calibrate" $calibrate "evaluate" $evaluate | toJson -}}
{{- end -}}

{{- /* What one release cannot be, said before anything is made. */ -}}
{{- define "kvx.check" -}}
{{- $many := or (gt (int .Values.replicas) 1) (and .Values.autoscaling.enabled (gt (int .Values.autoscaling.maxReplicas) 1)) .Values.prepare.enabled -}}
{{- if and $many (not .Values.cache.existingClaim) (not (has "ReadWriteMany" .Values.cache.accessModes)) -}}
{{- fail "several replicas, or replicas and the job of `prepare`, share the cache volume: cache.accessModes needs ReadWriteMany; else set replicas=1, autoscaling.enabled=false and prepare.enabled=false" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling.minReplicas is greater than autoscaling.maxReplicas" -}}
{{- end -}}
{{- range .Values.extraArgs -}}
{{- $flag := splitList "=" . | first | replace "_" "-" -}}
{{- if or (has $flag (list "--host" "--port" "--uds" "--kv-policy" "--additional-config" "--model" "--served-model-name" "--revision" "--max-model-len" "--tensor-parallel-size" "-tp" "--data-parallel-size" "-dp" "--shutdown-timeout")) (hasPrefix "--additional-config." $flag) -}}
{{- fail (printf "extraArgs: %s is the chart's own: use its values" $flag) -}}
{{- end -}}
{{- if and $.Values.drainSeconds (has $flag (list "--api-server-count" "-asc")) -}}
{{- fail (printf "extraArgs: %s: several API servers cut their answers off when they end, whatever drainSeconds is: leave it out, or set drainSeconds=0" $flag) -}}
{{- end -}}
{{- end -}}
{{- range .Values.router.extraArgs -}}
{{- $flag := splitList "=" . | first | replace "_" "-" -}}
{{- if or (has $flag (list "--host" "--port" "--policy" "--selector" "--prometheus-host" "--prometheus-port")) (hasPrefix "--service-discovery" $flag) -}}
{{- fail (printf "router.extraArgs: %s is the chart's own" $flag) -}}
{{- end -}}
{{- end -}}
{{- range list .Values.resources.requests .Values.resources.limits -}}
{{- if hasKey (. | default dict) $.Values.gpu.resource -}}
{{- fail (printf "resources: %s is the chart's own: set gpu.count" $.Values.gpu.resource) -}}
{{- end -}}
{{- end -}}
{{- $gpus := include "kvx.gpus" . | int -}}
{{- $ranks := mul .Values.tensorParallelSize .Values.dataParallelSize | int -}}
{{- if and $gpus (lt $gpus $ranks) -}}
{{- fail (printf "gpu.count=%d is less than the %d GPUs of tensorParallelSize times dataParallelSize" $gpus $ranks) -}}
{{- end -}}
{{- range .Values.env -}}
{{- if or (and $.Values.huggingfaceToken.name (eq .name "HF_TOKEN")) (and $.Values.apiKey.name (eq .name "VLLM_API_KEY")) -}}
{{- fail (printf "env: %s is given by a Secret already: keep one" .name) -}}
{{- end -}}
{{- end -}}
{{- if .Values.prepare.enabled -}}
{{- if and (has (include "kvx.cacheDtype" .) (list "bfloat16" "float16")) (not (hasKey .Values.prepare.engineArgs "kv_cache_dtype")) -}}
{{- fail "extraArgs: the job of `prepare` would measure another engine than one with --kv-cache-dtype: set prepare.engineArgs.kv_cache_dtype too, or prepare.enabled=false" -}}
{{- end -}}
{{- range .Values.extraArgs -}}
{{- $flag := splitList "=" . | first | replace "_" "-" -}}
{{- $keyword := get (dict "--trust-remote-code" "trust_remote_code" "--quantization" "quantization" "-q" "quantization" "--dtype" "dtype" "--kv-cache-dtype-skip-layers" "kv_cache_dtype_skip_layers") $flag -}}
{{- if and $keyword (not (hasKey $.Values.prepare.engineArgs $keyword)) -}}
{{- fail (printf "extraArgs: the job of `prepare` would measure another engine than one with %s: set prepare.engineArgs.%s too, or prepare.enabled=false" $flag $keyword) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.prepare.enabled (include "kvx.work" . | fromJson).evaluate -}}
{{- range .Values.prepare.lengths -}}
{{- if ge (int .) (int $.Values.maxModelLen) -}}
{{- fail (printf "prepare.lengths: prompts of %d tokens and their answers do not fit maxModelLen=%d" (int .) (int $.Values.maxModelLen)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range concat (list .Values.policy) .Values.layout -}}
{{- range splitList "+" . -}}
{{- $name := regexFind "^[a-z]+" . -}}
{{- if and (has $name (list "fastkv" "structkv" "snapkv" "pyramidkv" "criticalkv" "knorm" "streamingllm" "gemfilter")) (not (regexMatch "[:,](rate|kv_rate|kv_budget|recent)=" .)) -}}
{{- fail (printf "%s does not say how much stays, and its paper's rates lose answers: give %s, or write snapkv:kv_rate=0.2,after=32, which lost none of the short answers measured" . (eq $name "gemfilter" | ternary "rate, as in gemfilter:layer=13,rate=0.4" (printf "kv_rate, as in %s:kv_rate=0.4" $name))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $key, $value := .Values.additionalConfig -}}
{{- if has $key (list "kv_policy" "kv_layout") -}}
{{- fail (printf "additionalConfig.%s: set `policy` and `layout` of the chart instead" $key) -}}
{{- end -}}
{{- end -}}
{{- $parts := splitList "+" (prepend .Values.layout .Values.policy | join "+") -}}
{{- $names := list -}}
{{- range $parts }}{{- $names = append $names (regexFind "^[a-z]+" .) -}}{{- end -}}
{{- with .Values.additionalConfig.kv_stash_tokens -}}
{{- if lt (int .) (int $.Values.maxModelLen) -}}
{{- fail (printf "additionalConfig.kv_stash_tokens=%d is less than maxModelLen=%d: a longer prompt would wait for ever" (int .) (int $.Values.maxModelLen)) -}}
{{- end -}}
{{- if not (or (has "fastkv" $names) (has "structkv" $names)) -}}
{{- fail "additionalConfig.kv_stash_tokens has no effect: neither policy nor layout selects tokens to go on; remove it" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.additionalConfig.kv_recall_every (not (or (has "fier" $names) (has "quest" $names))) -}}
{{- fail "additionalConfig.kv_recall_every has no effect: neither policy nor layout retrieves; remove it" -}}
{{- end -}}
{{- end -}}

{{- /* Variables, volume and memory that servers and the job have in common. */ -}}
{{- define "kvx.env" -}}
- name: KVX_CACHE_ROOT
  value: /cache/vllm-kvx
{{- with .Values.huggingfaceToken.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.huggingfaceToken.key }}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvx.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 0
  fsGroup: 0
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
automountServiceAccountToken: false
# A service called vllm or kvx would set variables that vLLM and vllm-kvx read as their own.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.gpu.products }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            - key: nvidia.com/gpu.product
              operator: In
              values:
                {{- toYaml . | nindent 16 }}
{{- end }}
volumes:
  - name: cache
    persistentVolumeClaim:
      claimName: {{ include "kvx.claim" . }}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ .Values.sharedMemory }}
{{- end -}}

{{- define "kvx.container" -}}
image: {{ include "kvx.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
volumeMounts:
  - name: cache
    mountPath: /cache
  - name: shm
    mountPath: /dev/shm
{{- $gpus := .kvxGpus | default (include "kvx.gpus" .) | int }}
resources:
  requests:
    {{- toYaml .Values.resources.requests | nindent 4 }}
    {{- if $gpus }}
    {{ .Values.gpu.resource }}: {{ $gpus }}
    {{- end }}
  limits:
    {{- toYaml .Values.resources.limits | nindent 4 }}
    {{- if $gpus }}
    {{ .Values.gpu.resource }}: {{ $gpus }}
    {{- end }}
{{- end -}}
